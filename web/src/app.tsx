// The frame of the page: its tabs, the key, and whether the server answers.

import { signal } from "@preact/signals";
import type { FunctionComponent } from "preact";
import { useState } from "preact/hooks";

import { state } from "./api";
import { KeyEntry } from "./components/key_entry";
import { Problem, usePoll } from "./components/parts";
import { classifiers, embedders, keyed, locked, models, problem, rankers, refresh, talkers, usable, viewers } from "./session";
import logo from "./shoal.svg";
import { Chat } from "./tabs/chat";
import { Classify } from "./tabs/classify";
import { Embed } from "./tabs/embed";
import { Images } from "./tabs/images";
import { Live } from "./tabs/live";
import { Models } from "./tabs/models";
import { Rerank } from "./tabs/rerank";

const POLL_MS = 5000;

interface Tab {
  name: string;
  view: FunctionComponent;
  /** Whether it opens first: the first of these tabs that holds does. */
  serves: () => boolean;
}

const TABS: Tab[] = [
  { name: "Chat", view: Chat, serves: () => talkers().length > 0 },
  { name: "Embed", view: Embed, serves: () => embedders().length > 0 },
  { name: "Rerank", view: Rerank, serves: () => rankers().length > 0 },
  { name: "Classify", view: Classify, serves: () => classifiers().length > 0 },
  { name: "Images", view: Images, serves: () => viewers().length > 0 },
  { name: "Models", view: Models, serves: () => true },
  { name: "Live", view: Live, serves: () => true },
];

const hash = signal(location.hash.slice(1));
addEventListener("hashchange", () => (hash.value = location.hash.slice(1)));

/** Chosen once, when the models are known: the tab must not change under the reader's hands. */
const first = signal("");

/** Whether the only models are loading. */
const waits = (): boolean => !usable.value.length && (models.value ?? []).some((each) => ["loading", "downloading"].includes(state(each)));

function currentTab(): Tab | undefined {
  const wanted = hash.value || first.value;
  return TABS.find(({ name }) => name.toLowerCase() === wanted.toLowerCase()) ?? TABS.find(({ name }) => name === first.value);
}

export function App() {
  const [wantsKey, setWantsKey] = useState(false);
  usePoll(refresh, POLL_MS);
  if (models.value && !first.value && !waits()) first.value = TABS.find(({ serves }) => serves())?.name ?? "Models";
  const tab = currentTab();
  const View = tab?.view;
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>
        Skip to the content
      </a>
      <Header current={tab?.name ?? ""} onKey={() => setWantsKey(!wantsKey)} />
      <main id="main" tabIndex={-1}>
        <h1>{tab?.name ?? "Shoal"}</h1>
        {(locked.value || wantsKey) && <KeyEntry onDone={() => setWantsKey(false)} />}
        {!locked.value && <Problem text={problem.value} />}
        {!locked.value && models.value && View && <View />}
        {!locked.value && models.value && !View && (
          <p class="facts">
            The model is loading: <a href="#models">its progress</a>.
          </p>
        )}
        {!locked.value && !models.value && !problem.value && <p class="facts">Connecting…</p>}
      </main>
    </>
  );
}

function skip(event: Event): void {
  event.preventDefault(); // the fragment names the tab
  document.getElementById("main")?.focus();
}

function Header({ current, onKey }: { current: string; onKey: () => void }) {
  return (
    <header>
      <div class="brand">
        <img src={logo} alt="" width="32" height="32" />
        <span>Shoal</span>
      </div>
      <nav aria-label="Tabs">
        {TABS.map(({ name }) => (
          <a key={name} href={`#${name.toLowerCase()}`} aria-current={name === current ? "page" : undefined}>
            {name}
          </a>
        ))}
        <a href="./docs">API</a>
      </nav>
      <button type="button" class="quiet" onClick={onKey} disabled={locked.value}>
        {keyed.value ? "Key set" : "API key"}
      </button>
    </header>
  );
}
