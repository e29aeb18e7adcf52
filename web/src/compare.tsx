import { useState } from "preact/hooks";

import { cosine, embed, type Embedding, type Model } from "./api";

interface Outcome {
  similarity: number;
  embedding: Embedding;
}

function Facts({ embedding }: { embedding: Embedding }) {
  const words = [
    `${embedding.vectors[0]?.length ?? 0} dimensions`,
    `${embedding.tokens} tokens`,
    `${embedding.milliseconds.toFixed(1)} ms`,
  ];
  if (embedding.batch) words.push(`batch of ${embedding.batch}`);
  return <p class="facts">{words.join(" · ")}</p>;
}

export function Compare({ models, preferred }: { models: Model[]; preferred: string }) {
  const [texts, setTexts] = useState(["A shoal of fish turns as one.", "Many small fish swim together."]);
  const [picked, setPicked] = useState<string | null>(null);
  const [outcome, setOutcome] = useState<Outcome | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  const [busy, setBusy] = useState(false);
  const model = picked ?? preferred;

  const compare = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    try {
      const embedding = await embed(model, texts);
      setOutcome({ similarity: cosine(embedding.vectors[0] ?? [], embedding.vectors[1] ?? []), embedding });
      setProblem(null);
    } catch (error) {
      setOutcome(null);
      setProblem((error as Error).message);
    }
    setBusy(false);
  };

  return (
    <section aria-labelledby="try">
      <h2 id="try">Try it</h2>
      <form class="compare" onSubmit={compare}>
        {texts.map((text, i) => (
          <label key={i}>
            {i ? "Second text" : "First text"}
            <textarea
              rows={3}
              value={text}
              onInput={(event) => {
                const value = event.currentTarget.value;
                setTexts((all) => all.map((old, j) => (j === i ? value : old)));
              }}
            />
          </label>
        ))}
        <div class="go">
          {models.length > 1 && (
            <select aria-label="Model" value={model} onChange={(event) => setPicked(event.currentTarget.value)}>
              {models.map(({ id }) => (
                <option key={id}>{id}</option>
              ))}
            </select>
          )}
          <button type="submit" disabled={busy}>
            {busy ? "Embedding…" : "Compare"}
          </button>
          <output aria-live="polite">
            {outcome && (
              <>
                <span class="cosine">{outcome.similarity.toFixed(4)}</span>
                <meter min={0} max={1} value={Math.max(0, outcome.similarity)} aria-label="Cosine similarity" />
                <span>cosine similarity</span>
                <Facts embedding={outcome.embedding} />
              </>
            )}
            {problem && <span class="problem">{problem}</span>}
          </output>
        </div>
      </form>
    </section>
  );
}
