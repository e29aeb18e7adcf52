// Images: which texts describe pictures best.

import { signal } from "@preact/signals";
import { useState } from "preact/hooks";

import { timedPost, type Batch } from "../api";
import { Code } from "../components/code";
import { BatchFacts, Empty, lines, ModelPicker, Problem, usePicked, useTask } from "../components/parts";
import { readPictures } from "../components/pictures";
import { Ranking, type Ranked } from "../components/ranking";
import { viewers } from "../session";

const texts = signal("a photo of a cat\na photo of a dog\na diagram");
const pictures = signal<string[]>([]);

interface Reply {
  activation: string;
  images: { index: number; results: { text: string; score: number; cosine: number }[] }[];
}

interface Outcome {
  images: { url: string; ranked: Ranked[] }[];
  activation: string;
  batch: Batch | null;
  ms: number;
}

const requestOf = (model: string) => ({ model, images: pictures.value, texts: lines(texts.value) });

async function compare(model: string): Promise<Outcome> {
  const body = requestOf(model);
  if (!body.images.length) throw new Error("Add a picture first: drop one, or choose a file.");
  const { reply, batch, ms } = await timedPost<Reply>("rank", body);
  const images = reply.images.map(({ index, results }) => ({ url: body.images[index] ?? "", ranked: results }));
  return { images, activation: reply.activation, batch, ms };
}

export function Images() {
  const models = viewers();
  const [model, setModel] = usePicked(models);
  const { result, problem, busy, run } = useTask<Outcome>();
  if (!models.length)
    return <Empty what="No model for images and texts is served." command="shoal serve hf:openai/clip-vit-base-patch32" />;
  return (
    <>
      <form
        class="card stack"
        onSubmit={(event) => {
          event.preventDefault();
          void run(() => compare(model));
        }}
      >
        <Pictures />
        <label>
          Texts, one a line
          <textarea rows={3} value={texts.value} onInput={(event) => (texts.value = event.currentTarget.value)} />
        </label>
        <div class="bar">
          <ModelPicker models={models} value={model} onPick={setModel} />
          <button type="submit" disabled={busy}>
            {busy ? "Comparing…" : "Compare"}
          </button>
        </div>
        <Problem text={problem} />
      </form>
      <div aria-live="polite">{result && <Result {...result} />}</div>
      <Code example={{ path: "rank", body: requestOf(model) }} />
    </>
  );
}

function Result({ images, activation, batch, ms }: Outcome) {
  const meaning = activation === "softmax" ? "the scores of a picture add up to 1" : "each score stands alone, from 0 to 1";
  return (
    <>
      {images.map(({ url, ranked }, i) => (
        <section class="card picture-ranking" key={i} aria-label={`Ranking for picture ${i + 1}`}>
          <img src={url} alt={`Picture ${i + 1}`} />
          <Ranking ranked={ranked} />
        </section>
      ))}
      <BatchFacts batch={batch} ms={ms} more={[meaning]} />
    </>
  );
}

function Pictures() {
  const [over, setOver] = useState(false);
  const [problem, setProblem] = useState<string | null>(null);
  const add = async (files: Iterable<File>) => {
    try {
      const read = await readPictures(files);
      pictures.value = [...pictures.value, ...read];
      setProblem(null);
    } catch (error) {
      setProblem((error as Error).message);
    }
  };
  return (
    <div
      class={over ? "drop over" : "drop"}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setOver(false);
        void add(event.dataTransfer?.files ?? []);
      }}
    >
      <div class="pictures">
        {pictures.value.map((url, i) => (
          <button
            key={i}
            type="button"
            class="plain"
            aria-label={`Remove picture ${i + 1}`}
            onClick={() => (pictures.value = pictures.value.filter((_, j) => j !== i))}
          >
            <img src={url} alt="" />
          </button>
        ))}
      </div>
      <label class="file button quiet">
        Choose pictures
        <input
          type="file"
          accept="image/*"
          multiple
          onChange={(event) => {
            const input = event.currentTarget;
            void add([...(input.files ?? [])]).then(() => (input.value = ""));
          }}
        />
      </label>
      <span class="facts">or drop them here</span>
      <Problem text={problem} />
    </div>
  );
}
