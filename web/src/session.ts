// What all tabs share: the served models, and whether the server answers and accepts the key.

import { computed, signal } from "@preact/signals";

import { ApiError, fetchModels, key, makeOrder, state, type Model } from "./api";

export const models = signal<Model[] | null>(null);
export const locked = signal(false);
export const problem = signal<string | null>(null);
export const keyed = signal(key.get() !== "");

export const usable = computed(() => (models.value ?? []).filter((each) => ["ready", "sleeping"].includes(state(each))));

const order = makeOrder();

export async function refresh(): Promise<void> {
  const isOld = order();
  try {
    const found = await fetchModels();
    if (isOld()) return;
    models.value = found;
    locked.value = false;
    problem.value = null;
  } catch (error) {
    if (isOld()) return;
    locked.value = error instanceof ApiError && error.status === 401;
    problem.value = (error as Error).message;
  }
}

export function setKey(value: string): Promise<void> {
  key.set(value);
  keyed.value = value !== "";
  return refresh();
}

/** Return the usable models that `accepts` holds for, those that answer `task` by default first. */
export function pick(task: string, accepts: (model: Model) => boolean): Model[] {
  const found = usable.value.filter(accepts);
  const isDefault = (model: Model) => Number(model.default_for?.includes(task) ?? false);
  return found.sort((a, b) => isDefault(b) - isDefault(a));
}

const can = (model: Model, task: string): boolean => model.tasks?.includes(task) ?? false;
const sees = (model: Model): boolean => model.modalities?.includes("image") ?? false;

export const talkers = (): Model[] => pick("generate", (each) => can(each, "generate"));
export const embedders = (): Model[] => pick("embed", (each) => can(each, "embed") && each.modalities?.includes("text") !== false);
export const viewers = (): Model[] => pick("embed", (each) => can(each, "embed") && sees(each));

/** Rerankers, then embedders, with which the server ranks by cosine. */
export const rankers = (): Model[] => {
  const first = pick("rerank", (each) => can(each, "rerank"));
  return [...first, ...embedders().filter((each) => !first.includes(each))];
};

/** Classifiers; rerankers, which have one label, come last. */
export const classifiers = (): Model[] => {
  const found = pick("classify", (each) => can(each, "classify"));
  return [...found.filter((each) => !can(each, "rerank")), ...found.filter((each) => can(each, "rerank"))];
};
