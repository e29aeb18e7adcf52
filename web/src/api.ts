// Calls of the API, relative to Shoal's mount path. The key is stored in this browser tab only.

export interface Model {
  id: string;
  status: {
    value: "loaded" | "sleeping" | "loading" | "unloaded" | "downloading";
    failed?: boolean;
    error?: string | null;
    note?: string;
  };
  aliases?: string[];
  default_for?: string[];
  tasks?: string[];
  modalities?: string[];
  /** Whether its chat takes pictures; `modalities` are those that it embeds. */
  vision?: boolean;
  parent?: string;
  managed?: boolean;
  size?: number;
  source?: string;
  max_model_len?: number | null;
  backend?: string;
  dimension?: number | null;
  max_input_tokens?: number | null;
  precision?: string;
  space?: string;
}

export type State = "ready" | "sleeping" | "loading" | "downloading" | "failed" | "unloaded";

export function state({ status }: Model): State {
  if (status.failed) return "failed";
  return status.value === "loaded" ? "ready" : status.value;
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export const UNREACHABLE = "Cannot reach the server. Check that Shoal is running; this page tries again by itself.";

const KEY = "shoal-key";

/** Without the browser's storage, which may be forbidden, the key lasts until the page is left. */
function stored<T>(use: (storage: Storage) => T): T | undefined {
  try {
    return use(sessionStorage);
  } catch {
    return undefined;
  }
}

let current = stored((storage) => storage.getItem(KEY)) ?? "";

export const key = {
  get: (): string => current,
  set(value: string): void {
    current = value;
    stored((storage) => (value ? storage.setItem(KEY, value) : storage.removeItem(KEY)));
  },
};

export const address = (path: string): string => new URL(path, document.baseURI).href;

/** Send a request and return the response if it succeeded. Throws ApiError, with status 0 if nothing answered. */
export async function call(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key.get()) headers.set("authorization", `Bearer ${key.get()}`);
  let response: Response;
  try {
    response = await fetch(address(path), { ...init, headers });
  } catch (error) {
    if ((error as Error).name === "AbortError") throw error;
    throw new ApiError(0, UNREACHABLE);
  }
  if (response.ok) return response;
  throw new ApiError(response.status, (await readReason(response)) || `HTTP ${response.status}`);
}

async function readReason(response: Response): Promise<string | undefined> {
  try {
    const isText = response.headers.get("content-type")?.startsWith("text/plain");
    return isText ? (await response.text()).trim() : errorMessage(await response.json());
  } catch {
    return undefined; // not JSON, or cut short
  }
}

interface ErrorBody {
  error?: string | { message?: string } | null;
  detail?: string | { msg?: string }[] | null;
  message?: string;
}

/** Return the reason in the body of an error. The page calls routes of several dialects, each with its own form. */
export function errorMessage(body: unknown): string | undefined {
  const { error, detail, message } = (body ?? {}) as ErrorBody;
  const reasons = [
    typeof error === "string" ? error : error?.message,
    Array.isArray(detail) ? detail[0]?.msg : detail,
    message,
  ];
  return reasons.find((each): each is string => typeof each === "string" && each !== "");
}

const READ_TIMEOUT_MS = 30_000;

/** Get what the page reads again and again. A reading without an end fails at last, because the next one waits for it. */
export const read = (path: string): Promise<Response> => call(path, { signal: AbortSignal.timeout(READ_TIMEOUT_MS) });

/**
 * Order results that may overtake each other. Call it when a request begins: it returns a function that says, when the
 * result is there, whether that of a later request came before.
 */
export function makeOrder(): () => () => boolean {
  let begun = 0;
  let newest = 0;
  return () => {
    const mine = ++begun;
    return () => {
      newest = Math.max(newest, mine);
      return mine < newest;
    };
  };
}

export function post(path: string, body: unknown, signal?: AbortSignal): Promise<Response> {
  return call(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    ...(signal ? { signal } : {}),
  });
}

/** Return the served models, or with `all` also those that could be loaded. Adapters are part of their model. */
export async function fetchModels(all = false): Promise<Model[]> {
  const body = (await (await read(all ? "models" : "v1/models")).json()) as { data: Model[] };
  return body.data.filter((model) => !model.parent);
}

/** What a reply's headers say about its batch. */
export interface Batch {
  size: string;
  id: string;
  count: number;
  flush: string;
  queueMs: string;
  truncated: number;
  inferMs: string | undefined;
}

export function readBatch(headers: Headers): Batch | null {
  const size = headers.get("x-shoal-batch-size");
  if (!size) return null;
  return {
    size,
    id: headers.get("x-shoal-batch-id") ?? "",
    count: Number(headers.get("x-shoal-batches") ?? 1),
    flush: headers.get("x-shoal-flush") ?? "",
    queueMs: headers.get("x-shoal-queue-ms") ?? "",
    truncated: Number(headers.get("x-shoal-truncated") ?? 0),
    inferMs: /infer;dur=([\d.]+)/.exec(headers.get("server-timing") ?? "")?.[1],
  };
}

/** Post `body` and return the reply with its batch and the time it took, in milliseconds. */
export async function timedPost<T>(path: string, body: unknown): Promise<{ reply: T; batch: Batch | null; ms: number }> {
  const begun = performance.now();
  const response = await post(path, body);
  const reply = (await response.json()) as T;
  return { reply, batch: readBatch(response.headers), ms: performance.now() - begun };
}
