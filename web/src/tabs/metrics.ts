// Reads Prometheus text, and computes rates and percentiles of two readings.

export interface Sample {
  labels: Record<string, string>;
  value: number;
}

export interface Reading {
  /** Seconds of the browser's clock. */
  at: number;
  /** By name. */
  samples: Map<string, Sample[]>;
}

/** The metrics that the page reads: all of those of a server with many models cost it several times as much. */
export const SHOWN = [
  "shoal_model_state",
  "shoal_requests_total",
  "shoal_request_seconds",
  "shoal_requests_in_flight",
  "shoal_queue_items",
  "shoal_tokens_total",
  "shoal_prompt_tokens_total",
  "shoal_generated_tokens_total",
  "shoal_batch_size",
  "shoal_replica_ejected",
  "shoal_replica_ejections_total",
];
const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export function parse(text: string): Map<string, Sample[]> {
  const samples = new Map<string, Sample[]>();
  for (const line of text.split("\n")) {
    const found = LINE.exec(line); // not of a comment
    if (!found?.[1]) continue;
    if (!samples.has(found[1])) samples.set(found[1], []);
    const labels: Record<string, string> = {};
    for (const [, label = "", value = ""] of (found[2] ?? "").matchAll(LABEL)) labels[label] = value.replace(/\\(.)/g, "$1");
    samples.get(found[1])?.push({ labels, value: Number(found[3]) });
  }
  return samples;
}

/** Return the samples of a name, of one model or of all (""). */
export function select({ samples }: Reading, name: string, model: string): Sample[] {
  const found = samples.get(name) ?? [];
  return model ? found.filter(({ labels }) => labels.model === model) : found;
}

export const sum = (reading: Reading, name: string, model: string): number =>
  select(reading, name, model).reduce((total, { value }) => total + value, 0);

/** Return a counter's growth a second. A counter that shrank belongs to a restarted server and counts from 0. */
export function rate(before: Reading, after: Reading, names: string[], model: string): number {
  const grown = names.map((name) => grow(sum(before, name, model), sum(after, name, model)));
  return grown.reduce((a, b) => a + b, 0) / Math.max(0.001, after.at - before.at);
}

const grow = (before: number, after: number): number => (after < before ? after : after - before);

export interface Bucket {
  upTo: number;
  count: number;
}

/** Return what a histogram gained between two readings, as counts of each bucket, smallest first. */
export function buckets(before: Reading | null, after: Reading, name: string, model: string): Bucket[] {
  const old = before ? cumulative(before, name, model) : new Map<number, number>();
  const gained = [...cumulative(after, name, model)]
    .sort(([a], [b]) => a - b)
    .map(([upTo, count]) => ({ upTo, count: grow(old.get(upTo) ?? 0, count) }));
  return gained.map(({ upTo, count }, i) => ({ upTo, count: Math.max(0, count - (gained[i - 1]?.count ?? 0)) }));
}

function cumulative(reading: Reading, name: string, model: string): Map<number, number> {
  const totals = new Map<number, number>();
  for (const { labels, value } of select(reading, `${name}_bucket`, model)) {
    const upTo = labels.le === "+Inf" ? Infinity : Number(labels.le);
    totals.set(upTo, (totals.get(upTo) ?? 0) + value);
  }
  return totals;
}

/**
 * Return the value below which `share` of the counted lie, interpolated within its bucket as Prometheus's
 * histogram_quantile does; null if nothing was counted.
 */
export function quantile(counted: Bucket[], share: number): number | null {
  const total = counted.reduce((all, { count }) => all + count, 0);
  if (!total) return null;
  let left = share * total;
  let from = 0;
  for (const { upTo, count } of counted) {
    if (count && left <= count) return Number.isFinite(upTo) ? from + ((upTo - from) * left) / count : from;
    left -= count;
    if (Number.isFinite(upTo)) from = upTo;
  }
  return from;
}
