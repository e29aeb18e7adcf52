// Small parts that several tabs use.

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";

import type { Batch, Model } from "../api";

export function Problem({ text, children }: { text: string | null; children?: ComponentChildren }) {
  if (!text) return null;
  return (
    <p class="problem" role="alert">
      {text} {children}
    </p>
  );
}

export function Empty({ what, command }: { what: string; command: string }) {
  return (
    <div class="card empty">
      <p>{what}</p>
      <p>
        Pull one under <a href="#models">Models</a>, or start Shoal with it:
      </p>
      <pre>
        <code>{command}</code>
      </pre>
    </div>
  );
}

interface PickerProps {
  models: Model[];
  value: string;
  onPick: (id: string) => void;
}

export function ModelPicker({ models, value, onPick }: PickerProps) {
  return (
    <label class="picker">
      Model
      <select value={value} onChange={(event) => onPick(event.currentTarget.value)}>
        {models.map(({ id }) => (
          <option key={id} value={id}>
            {id}
          </option>
        ))}
      </select>
    </label>
  );
}

/** Return the picked model, or the first one while none is picked or the picked one is gone. */
export function usePicked(models: Model[]): [string, (id: string) => void] {
  const [picked, setPicked] = useState("");
  const known = models.some(({ id }) => id === picked);
  return [known ? picked : (models[0]?.id ?? ""), setPicked];
}

const FLUSHES: Record<string, string> = {
  idle: "sent at once, because the engine was free",
  full: "sent because the batch was full",
  age: "sent because its oldest item had waited longest",
};

export function BatchFacts({ batch, ms, more = [] }: { batch: Batch | null; ms: number; more?: string[] }) {
  const words = [...more, `${ms.toFixed(1)} ms`];
  if (batch) {
    words.push(`batch of ${batch.size}`);
    if (batch.count > 1) words.push(`${batch.count} batches`);
    words.push(`queued ${batch.queueMs} ms`);
    if (batch.inferMs) words.push(`engine ${batch.inferMs} ms`);
    const flush = FLUSHES[batch.flush];
    if (flush) words.push(flush);
    if (batch.truncated) words.push(`${batch.truncated} truncated`);
  }
  return <p class="facts">{words.join(" · ")}</p>;
}

/** A task that runs on a button: its result, its error, and whether it runs. A later run replaces an earlier one. */
export function useTask<T>(): {
  result: T | null;
  problem: string | null;
  busy: boolean;
  run: (task: () => Promise<T>) => Promise<void>;
} {
  const [result, setResult] = useState<T | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  const [busy, setBusy] = useState(false);
  const run = async (task: () => Promise<T>) => {
    setBusy(true);
    try {
      setResult(await task());
      setProblem(null);
    } catch (error) {
      setResult(null);
      setProblem((error as Error).message);
    }
    setBusy(false);
  };
  return { result, problem, busy, run };
}

/** Run a task that does not fail while the component is shown: now, then each `ms` after its end if the page is visible. */
export function usePoll(task: () => Promise<void>, ms: number): void {
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let gone = false;
    const wait = () => {
      if (!gone) timer = setTimeout(() => (document.hidden ? wait() : void next()), ms);
    };
    const next = async () => {
      await task();
      wait();
    };
    void next();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, []);
}

export const lines = (text: string): string[] => text.split("\n").filter((line) => line.trim() !== "");
