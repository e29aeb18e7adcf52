// Rerank: documents in the order in which they answer a query.

import { signal } from "@preact/signals";

import { timedPost, type Batch } from "../api";
import { Code } from "../components/code";
import { BatchFacts, Empty, lines, ModelPicker, Problem, usePicked, useTask } from "../components/parts";
import { Ranking, type Ranked } from "../components/ranking";
import { models, rankers } from "../session";

const query = signal("What swims in a shoal?");
const documents = signal(
  ["Small fish swim together for safety.", "Interest rates rose again.", "A herd of cows grazes.", "Tuna hunt in groups."].join(
    "\n",
  ),
);

interface Outcome {
  ranked: Ranked[];
  batch: Batch | null;
  ms: number;
}

interface Reply {
  results: { index: number; relevance_score: number }[];
}

async function rerank(model: string): Promise<Outcome> {
  const texts = lines(documents.value);
  const { reply, batch, ms } = await timedPost<Reply>("v1/rerank", { model, query: query.value, documents: texts });
  const ranked = reply.results.map(({ index, relevance_score: score }) => ({ text: texts[index] ?? "", score }));
  return { ranked, batch, ms };
}

export function Rerank() {
  const served = rankers();
  const [model, setModel] = usePicked(served);
  const { result, problem, busy, run } = useTask<Outcome>();
  if (!served.length)
    return <Empty what="No reranker or embedding model is served." command="shoal serve hf:cross-encoder/ms-marco-MiniLM-L6-v2" />;
  const isReranker = models.value?.find(({ id }) => id === model)?.tasks?.includes("rerank");
  const body = { model, query: query.value, documents: lines(documents.value) };
  return (
    <>
      <form
        class="card stack"
        onSubmit={(event) => {
          event.preventDefault();
          void run(() => rerank(model));
        }}
      >
        <label>
          Query
          <input value={query.value} onInput={(event) => (query.value = event.currentTarget.value)} />
        </label>
        <label>
          Documents, one a line
          <textarea rows={5} value={documents.value} onInput={(event) => (documents.value = event.currentTarget.value)} />
        </label>
        <div class="bar">
          <ModelPicker models={served} value={model} onPick={setModel} />
          <button type="submit" disabled={busy}>
            {busy ? "Ranking…" : "Rerank"}
          </button>
        </div>
        {!isReranker && <p class="facts">This model embeds texts: the score is the cosine of query and document.</p>}
        <Problem text={problem} />
      </form>
      <div aria-live="polite">
        {result && (
          <section class="card" aria-label="Ranking">
            <Ranking ranked={result.ranked} />
            <BatchFacts batch={result.batch} ms={result.ms} />
          </section>
        )}
      </div>
      <Code example={{ path: "v1/rerank", body }} />
    </>
  );
}
