// Classify: the labels that a classifier gives to texts, or to pairs of texts, with their scores.

import { signal } from "@preact/signals";

import { timedPost, type Batch } from "../api";
import { Code } from "../components/code";
import { BatchFacts, Empty, lines, ModelPicker, Problem, usePicked, useTask } from "../components/parts";
import { Ranking } from "../components/ranking";
import { classifiers } from "../session";

const SHOWN = 10; // labels of a text: some models have a thousand

const texts = signal("I love the sea.\nThe ferry was late, and nobody told us why.");
const seconds = signal("The sea is dear to me.\nThe ferry was on time.");
const paired = signal(false);

interface Label {
  label: string;
  score: number;
}

interface Outcome {
  inputs: string[][];
  labels: Label[][];
  batch: Batch | null;
  ms: number;
}

/** Each input is a list of one text, or of the two of a pair. */
function inputsOf(): string[][] {
  if (!paired.value) return lines(texts.value).map((text) => [text]);
  const first = texts.value.split("\n");
  const second = seconds.value.split("\n");
  const count = Math.max(first.length, second.length);
  const pairs = Array.from({ length: count }, (_, i) => [first[i] ?? "", second[i] ?? ""]);
  return pairs.filter((pair) => pair.some((text) => text.trim()));
}

const requestOf = (model: string) => ({ model, inputs: inputsOf() });

async function classify(model: string): Promise<Outcome> {
  const body = requestOf(model);
  const half = body.inputs.find((texts) => !texts.every((text) => text.trim()));
  if (!body.inputs.length) throw new Error("Write at least one line to classify.");
  if (half) throw new Error(`Each line needs a text in both boxes: "${half.join("").trim()}" stands alone.`);
  const { reply, batch, ms } = await timedPost<Label[][]>("predict", body);
  return { inputs: body.inputs, labels: reply, batch, ms };
}

export function Classify() {
  const models = classifiers();
  const [model, setModel] = usePicked(models);
  const { result, problem, busy, run } = useTask<Outcome>();
  if (!models.length)
    return (
      <Empty
        what="No classifier is served."
        command="shoal serve hf:distilbert/distilbert-base-uncased-finetuned-sst-2-english"
      />
    );
  return (
    <>
      <form
        class="card stack"
        onSubmit={(event) => {
          event.preventDefault();
          void run(() => classify(model));
        }}
      >
        <Inputs />
        <div class="bar">
          <ModelPicker models={models} value={model} onPick={setModel} />
          <button type="submit" disabled={busy}>
            {busy ? "Classifying…" : "Classify"}
          </button>
        </div>
        <Problem text={problem} />
      </form>
      <div aria-live="polite">{result && <Result {...result} />}</div>
      <Code example={{ path: "predict", body: requestOf(model) }} />
    </>
  );
}

function Inputs() {
  return (
    <>
      <label class="check">
        <input type="checkbox" checked={paired.value} onChange={(event) => (paired.value = event.currentTarget.checked)} />
        <span>Pairs of texts, such as a premise and a hypothesis</span>
      </label>
      <div class="columns">
        <label>
          Texts, one a line
          <textarea rows={4} value={texts.value} onInput={(event) => (texts.value = event.currentTarget.value)} />
        </label>
        {paired.value && (
          <label>
            Second texts, one for each line
            <textarea rows={4} value={seconds.value} onInput={(event) => (seconds.value = event.currentTarget.value)} />
          </label>
        )}
      </div>
    </>
  );
}

function Result({ inputs, labels, batch, ms }: Outcome) {
  return (
    <>
      {labels.map((found, i) => (
        <section class="card" key={i} aria-label={`Labels of text ${i + 1}`}>
          <h2>{inputs[i]?.map((text, j) => <div key={j}>{text}</div>)}</h2>
          <Ranking ranked={found.slice(0, SHOWN).map(({ label, score }) => ({ text: label, score }))} />
          {found.length > SHOWN && <p class="facts">{found.length - SHOWN} more labels have lower scores.</p>}
        </section>
      ))}
      <BatchFacts batch={batch} ms={ms} />
    </>
  );
}
