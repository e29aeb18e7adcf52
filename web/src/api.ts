// The pages' API calls, relative to Shoal's mount path. The key is stored in this tab only.

export interface Model {
  id: string;
  status: { value: "loaded" | "loading" | "unloaded"; failed?: boolean; error?: string | null };
  aliases?: string[];
  default_for?: string[];
  tasks?: string[];
  parent?: string;
  max_model_len?: number | null;
  backend?: string;
  dimension?: number | null;
  max_input_tokens?: number | null;
  precision?: string;
}

export type State = "ready" | "loading" | "failed" | "unloaded";

export function state({ status }: Model): State {
  if (status.failed) return "failed";
  return status.value === "loaded" ? "ready" : status.value;
}

export interface Embedding {
  vectors: number[][];
  tokens: number;
  milliseconds: number;
  batch: string | null;
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

const KEY = "shoal-key";

export const key = {
  get: (): string => sessionStorage.getItem(KEY) ?? "",
  set(value: string): void {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  },
};

export const address = (path: string): string => new URL(path, document.baseURI).href;

async function call(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key.get()) headers.set("authorization", `Bearer ${key.get()}`);
  const response = await fetch(address(path), { ...init, headers });
  if (response.ok) return response;
  const body: unknown = await response.json().catch(() => null);
  const message = (body as { error?: { message?: string } } | null)?.error?.message;
  throw new ApiError(response.status, message ?? `HTTP ${response.status}`);
}

export async function models(): Promise<Model[]> {
  const body = (await (await call("v1/models")).json()) as { data: Model[] };
  return body.data.filter((model) => !model.parent); // adapters are part of their model
}

export async function embed(model: string, input: string[]): Promise<Embedding> {
  const begun = performance.now();
  const response = await call("v1/embeddings", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ model, input, encoding_format: "float" }),
  });
  const body = (await response.json()) as {
    data: { embedding: number[] }[];
    usage: { prompt_tokens: number };
  };
  return {
    vectors: body.data.map((row) => row.embedding),
    tokens: body.usage.prompt_tokens,
    milliseconds: performance.now() - begun,
    batch: response.headers.get("x-shoal-batch-size"),
  };
}

export function cosine(a: number[], b: number[]): number {
  let dot = 0;
  let aa = 0;
  let bb = 0;
  a.forEach((x, i) => {
    const y = b[i] ?? 0;
    dot += x * y;
    aa += x * x;
    bb += y * y;
  });
  return dot / Math.sqrt(aa * bb);
}
