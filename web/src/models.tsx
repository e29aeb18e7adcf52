import { state, type Model } from "./api";

function facts(model: Model): string[] {
  const words: string[] = [];
  if (model.dimension) words.push(`${model.dimension} dimensions`);
  if (model.max_input_tokens) words.push(`up to ${model.max_input_tokens} tokens`);
  if (model.max_model_len) words.push(`context of ${model.max_model_len} tokens`);
  if (model.precision) words.push(model.precision);
  if (model.backend) words.push(model.backend);
  if (model.aliases?.length) words.push(`aliases: ${model.aliases.join(", ")}`);
  return words;
}

export function Models({ list, problem }: { list: Model[] | null; problem: string | null }) {
  return (
    <section aria-labelledby="models">
      <h2 id="models">Models</h2>
      {problem && (
        <p class="problem" role="alert">
          {problem}
        </p>
      )}
      {list?.length === 0 && <p>No models served. Start Shoal with a model: shoal serve ADDRESS</p>}
      <ul class="models">
        {list?.map((model) => (
          <li key={model.id}>
            <div>
              <strong>{model.id}</strong>
              <span class={`state ${state(model)}`}>{state(model)}</span>
            </div>
            <p>{model.status.error ?? facts(model).join(" · ")}</p>
          </li>
        ))}
      </ul>
    </section>
  );
}
