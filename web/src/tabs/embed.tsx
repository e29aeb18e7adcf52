// Embed: how similar lines of text are to a model.

import { signal } from "@preact/signals";
import { useMemo } from "preact/hooks";

import { timedPost, type Batch } from "../api";
import { Code } from "../components/code";
import { BatchFacts, Empty, lines, ModelPicker, Problem, usePicked, useTask } from "../components/parts";
import { embedders } from "../session";
import { cosines, nearestPairs, project } from "./geometry";
import { placeLabels } from "./labels";

const SAMPLE = [
  "A shoal of fish turns as one.",
  "Many small fish swim together.",
  "Sharks hunt at the edge of the reef.",
  "The central bank raised interest rates.",
  "Inflation makes loans more expensive.",
  "My bank sent me a new credit card.",
].join("\n");
const MAX_LINES = 500; // of which the map draws a point each
const MAX_CELLS = 60; // lines on each side of the heat map
const PAIRS = 5;

const text = signal(SAMPLE); // outlives a change of the tab

interface Outcome {
  texts: string[];
  vectors: number[][];
  tokens: number;
  batch: Batch | null;
  ms: number;
}

async function embed(model: string, texts: string[]): Promise<Outcome> {
  if (texts.length < 2) throw new Error("Write at least two lines to compare.");
  if (texts.length > MAX_LINES) throw new Error(`${texts.length} lines: this page compares up to ${MAX_LINES}.`);
  const { reply, batch, ms } = await timedPost<{ data: { embedding: number[] }[]; usage: { prompt_tokens: number } }>(
    "v1/embeddings",
    { model, input: texts, encoding_format: "float" },
  );
  return { texts, vectors: reply.data.map((row) => row.embedding), tokens: reply.usage.prompt_tokens, batch, ms };
}

export function Embed() {
  const models = embedders();
  const [model, setModel] = usePicked(models);
  const { result, problem, busy, run } = useTask<Outcome>();
  if (!models.length) return <Empty what="No embedding model is served." command="shoal serve" />;
  const submit = (event: Event) => {
    event.preventDefault();
    void run(() => embed(model, lines(text.value)));
  };
  return (
    <>
      <form class="card stack" onSubmit={submit}>
        <label>
          Texts, one a line
          <textarea rows={7} value={text.value} onInput={(event) => (text.value = event.currentTarget.value)} />
        </label>
        <div class="bar">
          <ModelPicker models={models} value={model} onPick={setModel} />
          <button type="submit" disabled={busy}>
            {busy ? "Embedding…" : "Embed"}
          </button>
        </div>
        <Problem text={problem} />
      </form>
      <div aria-live="polite">{result && <Result {...result} />}</div>
      <Code example={{ path: "v1/embeddings", body: { model, input: lines(text.value) }, client: "embeddings.create" }} />
    </>
  );
}

function Result({ texts, vectors, tokens, batch, ms }: Outcome) {
  const matrix = useMemo(() => cosines(vectors), [vectors]);
  const pairs = useMemo(() => nearestPairs(matrix, PAIRS), [matrix]);
  return (
    <>
      <BatchFacts batch={batch} ms={ms} more={[`${vectors[0]?.length ?? 0} dimensions`, `${tokens} tokens`]} />
      <div class="columns">
        <section class="card" aria-labelledby="heat">
          <h2 id="heat">Similarity</h2>
          {texts.length <= MAX_CELLS ? (
            <HeatMap texts={texts} matrix={matrix} />
          ) : (
            <p class="facts">Shown for up to {MAX_CELLS} lines.</p>
          )}
        </section>
        <section class="card" aria-labelledby="map">
          <h2 id="map">Map</h2>
          <PointMap texts={texts} vectors={vectors} />
        </section>
      </div>
      <section class="card" aria-labelledby="pairs">
        <h2 id="pairs">Nearest pairs</h2>
        <ol class="pairs">
          {pairs.map(({ a, b, cosine }) => (
            <li key={`${a} ${b}`}>
              <span class="score">{cosine.toFixed(4)}</span>
              <span>
                {texts[a]} <span class="facts">({a + 1})</span>
                <br />
                {texts[b]} <span class="facts">({b + 1})</span>
              </span>
            </li>
          ))}
        </ol>
      </section>
    </>
  );
}

/** Colors go from the least similar pair to equality: models differ in what they call dissimilar. */
function HeatMap({ texts, matrix }: { texts: string[]; matrix: number[][] }) {
  const low = Math.min(...matrix.flat());
  const share = (cosine: number) => Math.round((100 * (cosine - low)) / (1 - low || 1));
  return (
    <div class="wide" tabIndex={0} role="region" aria-label="Table of cosine similarities">
      <table class="heat">
        <thead>
          <tr>
            <td />
            {texts.map((each, i) => (
              <th key={i} scope="col" title={each}>
                {i + 1}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {matrix.map((row, i) => (
            <tr key={i}>
              <th scope="row" title={texts[i]}>
                <span>
                  {i + 1}. {texts[i]}
                </span>
              </th>
              {row.map((cosine, j) => (
                <td
                  key={j}
                  title={`${texts[i]}\n${texts[j]}\n${cosine.toFixed(4)}`}
                  style={{ backgroundColor: `color-mix(in srgb, var(--heat) ${share(cosine)}%, var(--surface))` }}
                >
                  {cosine.toFixed(2)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const WIDTH = 480;
const HEIGHT = 340;
const MARGIN = 36;
const narrow = matchMedia("(max-width: 44rem)"); // there the map is drawn smaller, so its text has to be larger

function PointMap({ texts, vectors }: { texts: string[]; vectors: number[][] }) {
  const { points, shares } = useMemo(() => project(vectors), [vectors]);
  const size = Math.max(...points.flat().map(Math.abs)) || 1;
  const place = (value: number, extent: number) => extent / 2 + (value / size) * (extent / 2 - MARGIN);
  const places = points.map(([x, y]): [number, number] => [place(x, WIDTH), place(-y, HEIGHT)]);
  const letters = narrow.matches ? 20 : 14;
  const labels = placeLabels(places, letters, WIDTH, HEIGHT);
  return (
    <figure class="map">
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label="Map of the texts: similar ones lie close together">
        {places.map(([x, y], i) => (
          <circle key={i} cx={x} cy={y} r="5">
            <title>{`${i + 1}. ${texts[i]}`}</title>
          </circle>
        ))}
        {labels.map(({ text, x, y, names }) => (
          <text key={text} x={x} y={y} font-size={letters} text-anchor="middle" dominant-baseline="central">
            <title>{names.map((i) => `${i + 1}. ${texts[i]}`).join("\n")}</title>
            {text}
          </text>
        ))}
      </svg>
      <figcaption class="facts">
        The two principal components; they show {((shares[0] + shares[1]) * 100).toFixed(0)} % of the variance. Points that
        touch share a label.
      </figcaption>
    </figure>
  );
}
