// Conversations, kept in this browser only.

import { effect, signal } from "@preact/signals";

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Stats {
  tokens: number;
  promptTokens: number;
  firstMs: number;
  perSecond: number | null;
}

export interface Message {
  role: "user" | "assistant";
  text: string;
  images?: string[];
  reasoning?: string;
  calls?: ToolCall[];
  stats?: Stats;
  /** Fields of the request that the server ignored. */
  ignored?: string;
  error?: string;
  /** Why the answer ended early: the user's click, or the token limit. */
  ended?: "stopped" | "length";
}

export interface Parameters {
  system: string;
  temperature: string;
  top_p: string;
  max_tokens: string;
  seed: string;
  tools: string;
}

export interface Conversation extends Parameters {
  id: string;
  model: string;
  messages: Message[];
}

const KEY = "shoal-conversations";
const MAX_KEPT = 100;

export const NO_PARAMETERS: Parameters = { system: "", temperature: "", top_p: "", max_tokens: "", seed: "", tools: "" };

const makeId = (): string => Math.random().toString(36).slice(2); // crypto.randomUUID needs HTTPS

const begin = (parameters: Parameters, model: string): Conversation => ({
  ...NO_PARAMETERS,
  ...parameters,
  id: makeId(),
  model,
  messages: [],
});

function load(): Conversation[] {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? (found as Conversation[]) : [];
  } catch {
    return []; // written by something else, or storage is forbidden: start empty
  }
}

const kept = load();
const first = kept[0] ?? begin(NO_PARAMETERS, "");

/** The newest first. One without messages is the one that was begun last; it is not stored. */
export const conversations = signal<Conversation[]>(kept.length ? kept : [first]);
export const currentId = signal(first.id);
/** Whether conversations could not be stored, because the browser's storage is full or forbidden. */
export const unsaved = signal(false);

export const current = (): Conversation => conversations.value.find(({ id }) => id === currentId.value) ?? first;

/** The answers that stream in this browser tab, by conversation: they go on while another one is shown. */
export const streams = signal<Record<string, AbortController>>({});

/** What this browser tab has changed and deleted since it last stored: another tab may store the rest. */
const changed = new Set<string>();
const deleted = new Set<string>();

/** When this tab last stored each conversation, in milliseconds. */
const written = new Map<string, number>();
const SETTLED_MS = 2000; // browsers tell tabs of each other's storage late

/** The conversations as this tab last read or wrote them: what differs from them now, another tab has changed. */
let base = byId(kept);

function byId(list: Conversation[]): Map<string, Conversation> {
  return new Map(list.map((each) => [each.id, each]));
}

export function update(id: string, change: (old: Conversation) => Conversation): void {
  changed.add(id);
  conversations.value = conversations.value.map((each) => (each.id === id ? change(each) : each));
}

export function updateLast(id: string, change: (old: Message) => Message): void {
  update(id, (old) => ({
    ...old,
    messages: old.messages.map((each, i) => (i === old.messages.length - 1 ? change(each) : each)),
  }));
}

/** Begin a conversation with the parameters of the current one. */
export function startNew(): void {
  showNew(current(), conversations.value);
}

/** Show a new conversation with the parameters of another one, above those of the list that have messages. */
function showNew({ messages: _, id: __, model, ...parameters }: Conversation, list: Conversation[]): void {
  const fresh = begin(parameters, model);
  conversations.value = [fresh, ...list.filter(({ messages }) => messages.length)];
  currentId.value = fresh.id;
}

export function remove(id: string): void {
  changed.delete(id);
  deleted.add(id);
  const left = conversations.value.filter((each) => each.id !== id);
  conversations.value = left.length ? left : [begin(NO_PARAMETERS, "")];
  if (currentId.value === id) currentId.value = conversations.value[0]?.id ?? "";
}

export function titleOf({ messages }: Conversation): string {
  const text = messages[0]?.text.trim() || (messages.length ? "Picture" : "New conversation");
  return text.length > 48 ? `${text.slice(0, 47)}…` : text;
}

let timer: ReturnType<typeof setTimeout> | undefined;
const SAVE_MS = 400; // an answer changes its conversation with every token

effect(() => {
  conversations.value; // subscribes
  streams.value;
  clearTimeout(timer);
  timer = setTimeout(save, SAVE_MS);
});
addEventListener("pagehide", () => save(true));
addEventListener("storage", ({ key }) => {
  if (key === KEY || key === null) adopt(load(), false);
});
addEventListener("pageshow", ({ persisted }) => {
  if (persisted) adopt(load(), false); // a page that "back" brought to life was told nothing meanwhile
});

/** Store what this tab changed beside what other tabs stored. If storage is full, pictures go first, then the oldest. */
function save(leaving = false): void {
  if (!changed.size && !deleted.size) return;
  const stored = load();
  const waiting = adopt(stored, leaving);
  const theirs = byId(stored);
  const merged = conversations.value
    .map((each) => (waiting.has(each.id) ? (theirs.get(each.id) ?? each) : each))
    .filter(({ messages }) => messages.length)
    .slice(0, MAX_KEPT);
  const whole = put(merged.map((each) => JSON.stringify(each)));
  let count = merged.length;
  if (!whole) {
    const bare = merged.map((each) => JSON.stringify(withoutPictures(each)));
    while (count && !put(bare.slice(0, count))) count--;
  }
  unsaved.value = !whole;
  if (!whole && !count) return; // what is stored stays, and the next change tries again
  base = rebase(load(), waiting);
  for (const id of changed) written.set(id, performance.now());
  deleted.clear();
  if (whole) changed.clear();
  else for (const { id } of merged.slice(count)) changed.add(id);
  for (const id of waiting) changed.add(id);
}

function put(texts: string[]): boolean {
  try {
    localStorage.setItem(KEY, `[${texts.join(",")}]`);
    return true;
  } catch {
    return false; // full or forbidden; what was stored stays
  }
}

/**
 * Take over what other tabs stored: show what they began or changed, drop what they deleted, and keep what this tab
 * changed. Where both wrote messages into one conversation, this tab's becomes a new one; return the ids of those that
 * have to wait with that until their answer is complete.
 */
function adopt(stored: Conversation[], leaving: boolean): Set<string> {
  const others = byId(stored.filter(({ id }) => !deleted.has(id)));
  const waiting = new Set<string>();
  const before = conversations.value;
  const shown = current();
  const own = before.flatMap((mine) => {
    const theirs = others.get(mine.id);
    others.delete(mine.id);
    if (!theirs) return isKept(mine.id) ? [mine] : [];
    if (!clash(mine, theirs)) return [isSame(theirs, base.get(mine.id)) ? mine : combine(mine, theirs)];
    if (!streams.value[mine.id] || leaving) return [fork(mine), theirs];
    waiting.add(mine.id);
    return [mine];
  });
  base = rebase(stored, waiting);
  const list = [...others.values(), ...own];
  if (!list.some(({ id }) => id === currentId.value)) showNew(shown, list); // the draft stays out of the others
  else if (list.length !== before.length || list.some((each, i) => each !== before[i])) conversations.value = list;
  return waiting; // an equal list is not assigned: it would save again, forever if storage is full
}

/** Return the new `base`: what is stored, but for the conversations whose difference is still to be settled. */
const rebase = (stored: Conversation[], waiting: Set<string>): Map<string, Conversation> =>
  byId([...stored, ...[...waiting].flatMap((id) => base.get(id) ?? [])]);

const isSame = (a: unknown, b: unknown): boolean => JSON.stringify(a) === JSON.stringify(b);

/** Whether a conversation that is not stored stays; one that was stored is gone if another tab deleted it. */
function isKept(id: string): boolean {
  if (!base.has(id)) return true;
  if (isRecent(id) || streams.value[id]) changed.add(id); // overwritten, or its answer streams: store it again
  return changed.has(id);
}

/** Whether this tab stored a conversation so recently that another one may have overwritten it without reading it. */
const isRecent = (id: string): boolean => performance.now() - (written.get(id) ?? -Infinity) < SETTLED_MS;

/** Whether the messages of both tabs, without pictures, differ from the last common ones, and theirs are not older. */
function clash(mine: Conversation, theirs: Conversation): boolean {
  const before = base.get(mine.id);
  const isOwn = changed.has(mine.id) && !hasSameTexts(mine, before);
  const isLost = isRecent(mine.id) && !startsWith(theirs, mine);
  const mineCounts = isOwn || isLost || streams.value[mine.id] !== undefined;
  return mineCounts && !hasSameTexts(theirs, before) && !startsWith(mine, theirs);
}

/** Return each field as the tab has it that changed it; messages as mine if theirs are an older copy. */
function combine(mine: Conversation, theirs: Conversation): Conversation {
  const isOlder = startsWith(mine, theirs);
  if (isOlder && mine.messages.length > theirs.messages.length) changed.add(mine.id);
  const newest = isOlder ? { ...theirs, messages: mine.messages } : theirs;
  if (!changed.has(mine.id)) return newest;
  const before = base.get(mine.id);
  const isMine = (name: string, value: unknown) =>
    name === "messages" ? !hasSameTexts(mine, before) : !isSame(value, before?.[name as keyof Conversation]);
  return { ...newest, ...Object.fromEntries(Object.entries(mine).filter(([name, value]) => isMine(name, value))) };
}

/** Whether the messages of one begin with those of the other. No click only removes messages: the shorter is older. */
const startsWith = (long: Conversation, short: Conversation): boolean =>
  hasSameTexts({ ...long, messages: long.messages.slice(0, short.messages.length) }, short);

/** Whether the messages are the same but for pictures, which a full storage drops. */
const hasSameTexts = (a: Conversation, b: Conversation | undefined): boolean =>
  b !== undefined && isSame(withoutPictures(a).messages, withoutPictures(b).messages);

/** Return a conversation under a new id, which stays in view if it was. */
function fork(mine: Conversation): Conversation {
  const id = makeId();
  changed.delete(mine.id);
  changed.add(id);
  if (currentId.value === mine.id) currentId.value = id;
  return { ...mine, id };
}

const withoutPictures = (each: Conversation): Conversation => ({
  ...each,
  messages: each.messages.map(({ images: _, ...message }) => message),
});
