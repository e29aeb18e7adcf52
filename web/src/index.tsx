import { render } from "preact";
import { useCallback, useEffect, useState } from "preact/hooks";

import { ApiError, key, models as fetchModels, state, type Model } from "./api";
import { Compare } from "./compare";
import { Models } from "./models";
import logo from "./shoal.svg";
import { curl, curlChat, curlClassify, curlRank, python, pythonChat } from "./snippets";

const POLL_MS = 5000;

function KeyEntry({ wanted, onChange }: { wanted: boolean; onChange: () => void }) {
  const [value, setValue] = useState(key.get());
  return (
    <form
      class={wanted ? "key wanted" : "key"}
      onSubmit={(event) => {
        event.preventDefault();
        key.set(value.trim());
        onChange();
      }}
    >
      <label>
        {wanted ? "This server requires an API key" : "API key"}
        <input
          type="password"
          autocomplete="off"
          placeholder="stored in this tab only"
          value={value}
          onInput={(event) => setValue(event.currentTarget.value)}
        />
      </label>
      <button type="submit">Use key</button>
    </form>
  );
}

function Snippet({ title, code }: { title: string; code: string }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(code);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return (
    <figure class="snippet">
      <figcaption>
        {title}
        {/* Browsers provide the clipboard only over HTTPS and on loopback. */}
        {navigator.clipboard && (
          <button type="button" class="quiet" onClick={copy} aria-label={`Copy the ${title} example`}>
            {copied ? "Copied" : "Copy"}
          </button>
        )}
      </figcaption>
      <pre>
        <code>{code}</code>
      </pre>
    </figure>
  );
}

function App() {
  const [list, setList] = useState<Model[] | null>(null);
  const [problem, setProblem] = useState<{ status: number; message: string } | null>(null);

  const load = useCallback(async () => {
    try {
      setList(await fetchModels());
      setProblem(null);
    } catch (error) {
      const status = error instanceof ApiError ? error.status : 0;
      setProblem({ status, message: status ? (error as Error).message : "Cannot reach the server." });
    }
  }, []);

  useEffect(() => {
    void load();
    // Do not poll from a background tab.
    const timer = setInterval(() => document.hidden || void load(), POLL_MS);
    return () => clearInterval(timer);
  }, [load]);

  const locked = problem?.status === 401;
  const able = (task: string) => (list ?? []).filter((model) => state(model) === "ready" && model.tasks?.includes(task));
  const first = (models: Model[], task: string) => models.find((model) => model.default_for?.includes(task)) ?? models[0];
  const embedders = able("embed");
  const embedder = first(embedders, "embed");
  const ranker = first(able("rerank"), "rerank");
  const judge = first(
    able("classify").filter((model) => !model.tasks?.includes("rerank")),
    "classify",
  );
  const talker = first(able("generate"), "generate");
  const guarded = key.get() !== "";

  return (
    <>
      <header>
        <img src={logo} alt="" width="56" height="56" />
        <div>
          <h1>Shoal</h1>
          <p>One inference gateway: the APIs your clients speak, batched across users.</p>
        </div>
        <nav aria-label="Pages">
          <a class="button" href="./docs">
            API docs
          </a>
          <a href="./openapi.json">openapi.json</a>
          {!locked && !key.get() && <a href="./metrics">Metrics</a>}
        </nav>
      </header>
      <main>
        {(locked || key.get()) && <KeyEntry wanted={locked} onChange={load} />}
        {!locked && <Models list={list} problem={problem?.message ?? null} />}
        {!locked && embedder && <Compare models={embedders} preferred={embedder.id} />}
        {!locked && (embedder || ranker || judge || talker) && (
          <section aria-labelledby="use">
            <h2 id="use">Use it in your code</h2>
            {embedder && (
              <div class="snippets">
                <Snippet title="curl" code={curl(embedder.id, guarded)} />
                <Snippet title="Python" code={python(embedder.id, guarded)} />
              </div>
            )}
            {(ranker || judge) && (
              <div class="snippets">
                {ranker && <Snippet title="curl, rerank" code={curlRank(ranker.id, guarded)} />}
                {judge && <Snippet title="curl, classify" code={curlClassify(judge.id, guarded)} />}
              </div>
            )}
            {talker && (
              <div class="snippets">
                <Snippet title="curl, chat" code={curlChat(talker.id, guarded)} />
                <Snippet title="Python, chat" code={pythonChat(talker.id, guarded)} />
              </div>
            )}
          </section>
        )}
      </main>
    </>
  );
}

const root = document.getElementById("app");
if (root) {
  root.replaceChildren();
  render(<App />, root);
}
