// "Copy as": the request on screen as a curl command, or as a program in Python or JavaScript.

import { useState } from "preact/hooks";

import { keyed } from "../session";
import { LANGUAGES, shorten, write, type Example, type Language } from "../snippets";

const COPIED_MS = 1500;

export function CopyButton({ label, text }: { label: string; text: () => string }) {
  const [copied, setCopied] = useState(false);
  // Browsers provide the clipboard only over HTTPS and on loopback.
  if (!navigator.clipboard) return null;
  const copy = async () => {
    await navigator.clipboard.writeText(text());
    setCopied(true);
    setTimeout(() => setCopied(false), COPIED_MS);
  };
  return (
    <button type="button" class="quiet" onClick={copy} aria-label={label}>
      {copied ? "Copied" : "Copy"}
    </button>
  );
}

export function Code({ example }: { example: Example }) {
  const [language, setLanguage] = useState<Language>("curl");
  const [open, setOpen] = useState(false);
  const text = open ? write(language, example, keyed.value) : ""; // the examples of chats are long, and change often
  return (
    <details class="code card" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Copy as curl, Python or JavaScript</summary>
      <div class="bar">
        <div role="group" aria-label="Language" class="choices">
          {LANGUAGES.map((each) => (
            <button
              key={each}
              type="button"
              class="quiet"
              aria-pressed={each === language}
              onClick={() => setLanguage(each)}
            >
              {each}
            </button>
          ))}
        </div>
        <CopyButton label={`Copy as ${language}`} text={() => text} />
      </div>
      <pre tabIndex={0} aria-label={`The request in ${language}`}>
        <code>{shorten(text)}</code>
      </pre>
    </details>
  );
}
