// Changes of models, through the API's jobs.

import { call, fetchModels, post, read, state } from "../api";

export interface Job {
  job: string;
  action: "load" | "download" | "unload" | "delete" | "sleep" | "wake";
  model: string;
  state: "running" | "done" | "failed" | "cancelled";
  stage?: string;
  progress?: number;
  done?: number;
  total?: number;
  created: number;
  error?: string;
}

export async function fetchJobs(): Promise<Job[]> {
  return ((await (await read("jobs")).json()) as { jobs: Job[] }).jobs;
}

const START = "?wait=false"; // reply with the job, not when it is done

/** Return the path of a model, or of what is done with it. A slash of its name stays one. */
export const modelPath = (model: string, action = ""): string =>
  `v1/models/${model.split("/").map(encodeURIComponent).join("/")}${action}`;

const path = (model: string, action = ""): string => modelPath(model, action) + START;

export const pull = (model: string) => post(`v1/models${START}`, { model });
export const load = (model: string) => post(path(model, "/load"), {});
export const unload = (model: string) => post(path(model, "/unload"), {});
export const remove = (model: string) =>
  call(path(model), { method: "DELETE", headers: { "content-type": "application/json" } });

/**
 * Put a model to sleep, in Ollama's form: a request without a prompt that keeps it for no time. Throws an Error if the
 * model is busy, which the reply does not say.
 */
export async function sleep(model: string): Promise<void> {
  await post("api/generate", { model, keep_alive: 0, stream: false });
  const found = (await fetchModels()).find(({ id }) => id === model);
  if (found && state(found) === "ready") throw new Error(`${model} is busy: try again when its requests are answered.`);
}
