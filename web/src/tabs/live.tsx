// Live: what the server does now, from /metrics, read every few seconds while the tab is shown.

import { signal } from "@preact/signals";
import { useState } from "preact/hooks";

import { ApiError, read } from "../api";
import { Chart } from "../components/chart";
import { Code } from "../components/code";
import { Problem, usePoll } from "../components/parts";
import { buckets, parse, quantile, rate, select, SHOWN, sum, type Reading } from "./metrics";

const READ_MS = 2500;
const KEPT = 120; // steps: five minutes
const WINDOW_S = 10; // percentiles of fewer seconds jump
const HISTOGRAM_S = 60;
const SHARES = [0.5, 0.95, 0.99];

/** What the charts show of one model, or of all (""), at one time. */
interface Figures {
  finished: number;
  latency: (number | null)[];
  waiting: number;
  inFlight: number;
  read: number;
  generated: number;
}

interface Step {
  at: number;
  of: Map<string, Figures>;
}

const readings = signal<Reading[]>([]); // of the last minute, of which histograms are made
const steps = signal<Step[]>([]);

async function measure(): Promise<void> {
  const text = await (await read(`metrics?format=prometheus&names=${SHOWN.join(",")}`)).text();
  const reading = { at: Date.now() / 1000, samples: parse(text) };
  const before = readings.value.at(-1);
  readings.value = [...readings.value, reading].filter((each) => each.at >= reading.at - HISTOGRAM_S);
  if (before) steps.value = [...steps.value, stepOf(before, reading)].slice(-KEPT);
}

const stepOf = (before: Reading, after: Reading): Step => ({
  at: after.at,
  of: new Map(["", ...modelsOf(after)].map((model) => [model, figures(before, after, model)])),
});

function figures(before: Reading, after: Reading, model: string): Figures {
  const grown = (...names: string[]) => rate(before, after, names, model);
  const counted = buckets(at(WINDOW_S, after.at), after, "shoal_request_seconds", model);
  return {
    finished: grown("shoal_requests_total"),
    latency: SHARES.map((share) => quantile(counted, share)),
    waiting: sum(after, "shoal_queue_items", model),
    inFlight: sum(after, "shoal_requests_in_flight", model),
    read: grown("shoal_tokens_total", "shoal_prompt_tokens_total"),
    generated: grown("shoal_generated_tokens_total"),
  };
}

const modelsOf = (reading: Reading): Set<string> =>
  new Set(select(reading, "shoal_model_state", "").flatMap(({ labels }) => labels.model ?? []));

/** Read as long as the tab is shown. */
function useReadings(): string | null {
  const [problem, setProblem] = useState<string | null>(null);
  usePoll(async () => {
    try {
      await measure();
      setProblem(null);
    } catch (error) {
      // An unreachable server is told at the top of the page.
      if ((error as ApiError).status !== 0) setProblem((error as Error).message);
    }
  }, READ_MS);
  return problem;
}

export function Live() {
  const problem = useReadings();
  const [model, setModel] = useState("");
  const last = readings.value.at(-1);
  if (!last) return problem ? <Problem text={problem} /> : <p class="facts">Reading…</p>;
  return (
    <>
      <Problem text={problem} />
      <div class="bar">
        <label class="picker">
          Model
          <select value={model} onChange={(event) => setModel(event.currentTarget.value)}>
            <option value="">all models</option>
            {[...modelsOf(last)].map((id) => (
              <option key={id}>{id}</option>
            ))}
          </select>
        </label>
      </div>
      <Charts model={model} />
      <BatchSizes last={last} model={model} />
      <Health last={last} model={model} />
      <Code example={{ path: "metrics", body: undefined, method: "GET" }} />
    </>
  );
}

const number = (value: number): string => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const seconds = (value: number): string => (value < 1 ? `${number(value * 1000)} ms` : `${number(value)} s`);

/** Return the first reading that is at most `ago` seconds older than `now`. */
const at = (ago: number, now: number): Reading | null => readings.value.find((each) => each.at >= now - ago) ?? null;

function Charts({ model }: { model: string }) {
  const times = steps.value.map((step) => step.at);
  const line = (label: string, value: (figures: Figures) => number | null) => ({
    label,
    values: steps.value.map(({ of }) => {
      const found = of.get(model);
      return found ? value(found) : null;
    }),
  });
  return (
    <div class="charts">
      <Chart title="Requests a second" times={times} format={number} lines={[line("finished", (each) => each.finished)]} />
      <Chart
        title="Latency"
        times={times}
        format={seconds}
        lines={SHARES.map((share, i) => line(`p${share * 100}`, ({ latency }) => latency[i] ?? null))}
      />
      <Chart
        title="Queue"
        times={times}
        format={number}
        lines={[line("items waiting", (each) => each.waiting), line("requests in flight", (each) => each.inFlight)]}
      />
      <Chart
        title="Tokens a second"
        times={times}
        format={number}
        lines={[line("read", (each) => each.read), line("generated", (each) => each.generated)]}
      />
    </div>
  );
}

function BatchSizes({ last, model }: { last: Reading; model: string }) {
  const counted = buckets(at(HISTOGRAM_S, last.at), last, "shoal_batch_size", model);
  const high = Math.max(...counted.map(({ count }) => count), 0);
  const shown = counted.slice(0, counted.findLastIndex(({ count }) => count > 0) + 1);
  const label = (i: number) => {
    const low = (shown[i - 1]?.upTo ?? 0) + 1;
    const upTo = shown[i]?.upTo ?? low;
    if (upTo === Infinity) return `${low} or more`;
    return low >= upTo ? `${upTo}` : `${low}–${upTo}`;
  };
  return (
    <section class="card" aria-labelledby="sizes">
      <h2 id="sizes">Batch sizes of the last minute</h2>
      {!shown.length && <p class="facts">No batches yet.</p>}
      <table class="bars">
        <tbody>
          {shown.map(({ count }, i) => (
            <tr key={i}>
              <th scope="row">{label(i)}</th>
              <td class="track">
                <span class="fill" style={{ width: `${(100 * count) / (high || 1)}%` }} />
              </td>
              <td>{number(count)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

function Health({ last, model }: { last: Reading; model: string }) {
  const replicas = select(last, "shoal_replica_ejected", model);
  const ejections = select(last, "shoal_replica_ejections_total", model);
  const states = select(last, "shoal_model_state", "").filter(({ value }) => value === 1);
  const stateOf = (id: string | undefined) => states.find(({ labels }) => labels.model === id)?.labels.state ?? "unloaded";
  return (
    <section class="card" aria-labelledby="health">
      <h2 id="health">Replicas</h2>
      <div class="wide" tabIndex={0} role="region" aria-label="Table of replicas">
        <table class="facts-table">
          <thead>
            <tr>
              <th scope="col">Model</th>
              <th scope="col">Replica</th>
              <th scope="col">State</th>
              <th scope="col">Ejections</th>
            </tr>
          </thead>
          <tbody>
            {replicas.map(({ labels, value }) => (
              <tr key={`${labels.model} ${labels.replica}`}>
                <td>{labels.model}</td>
                <td>{labels.replica}</td>
                <td>
                  <span class={`state ${value ? "failed" : stateOf(labels.model)}`}>
                    {value ? "ejected" : stateOf(labels.model)}
                  </span>
                </td>
                <td>{ejections.find((each) => each.labels.replica === labels.replica && each.labels.model === labels.model)?.value ?? 0}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
