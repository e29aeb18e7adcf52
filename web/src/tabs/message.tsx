import { useEffect, useRef, useState } from "preact/hooks";

import { CopyButton } from "../components/code";
import { Markdown } from "../components/markdown";
import { Problem } from "../components/parts";
import type { Message, Stats, ToolCall } from "./conversations";

interface MessageProps {
  message: Message;
  streaming: boolean;
  onRegenerate: (() => void) | null;
  /** Sends a changed message; returns whether it was sent. */
  onEdit: ((text: string) => boolean) | null;
}

export function MessageView(props: MessageProps) {
  return props.message.role === "user" ? <Question {...props} /> : <Answer {...props} />;
}

function Question({ message, onEdit }: MessageProps) {
  const [editing, setEditing] = useState(false);
  if (editing && onEdit) return <Edit text={message.text} onEdit={onEdit} onEnd={() => setEditing(false)} />;
  return (
    <article class="message user" aria-label="You">
      {message.images?.map((url, i) => <img key={i} src={url} alt={`Picture ${i + 1}`} />)}
      {message.text && <p>{message.text}</p>}
      {onEdit && (
        <div class="tools">
          <button type="button" class="quiet" onClick={() => setEditing(true)}>
            Edit
          </button>
        </div>
      )}
    </article>
  );
}

interface EditProps {
  text: string;
  onEdit: (text: string) => boolean;
  onEnd: () => void;
}

function Edit({ text, onEdit, onEnd }: EditProps) {
  const [draft, setDraft] = useState(text);
  const area = useRef<HTMLTextAreaElement>(null);
  useEffect(() => area.current?.focus(), []);
  return (
    <form
      class="message user editing"
      onSubmit={(event) => {
        event.preventDefault();
        if (onEdit(draft)) onEnd();
      }}
    >
      <textarea
        aria-label="Edit message"
        rows={3}
        value={draft}
        ref={area}
        onInput={(event) => setDraft(event.currentTarget.value)}
      />
      <div class="bar">
        <button type="button" class="quiet" onClick={onEnd}>
          Cancel
        </button>
        <button type="submit">Send again</button>
      </div>
    </form>
  );
}

function Answer({ message, streaming, onRegenerate }: MessageProps) {
  const { text, reasoning, calls, stats, ignored, error, ended } = message;
  return (
    <article class="message assistant" aria-label="Answer">
      {reasoning && (
        <details class="fold">
          <summary>Reasoning</summary>
          <p>{reasoning}</p>
        </details>
      )}
      <Markdown text={text} />
      {calls?.map((call, i) => <Call key={i} call={call} />)}
      {streaming && <p class="facts">{text || reasoning ? "…" : "Waiting for the first token…"}</p>}
      <Problem text={error ?? null} />
      {ignored && <p class="facts">The server ignored: {ignored}.</p>}
      {ended && <p class="facts">{ended === "stopped" ? "Stopped." : "The answer reached its maximum of tokens."}</p>}
      {!streaming && (
        <div class="tools">
          {stats && <span class="facts">{describe(stats)}</span>}
          {text && <CopyButton label="Copy the answer" text={() => text} />}
          {onRegenerate && (
            <button type="button" class="quiet" onClick={onRegenerate}>
              Regenerate
            </button>
          )}
        </div>
      )}
    </article>
  );
}

function describe({ tokens, firstMs, perSecond }: Stats): string {
  const words = [`${tokens} tokens`];
  if (perSecond !== null) words.push(`${perSecond.toFixed(1)} tokens/s`);
  if (firstMs) words.push(`first token after ${firstMs.toFixed(0)} ms`);
  return words.join(" · ");
}

function Call({ call }: { call: ToolCall }) {
  return (
    <details class="fold">
      <summary>
        Tool call: <code>{call.name}</code>
      </summary>
      <pre tabIndex={0}>
        <code>{indent(call.arguments)}</code>
      </pre>
    </details>
  );
}

function indent(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // incomplete while it streams
  }
}
