// Chat: conversations with a language model.

import { useEffect, useRef, useState } from "preact/hooks";

import type { Model } from "../api";
import { Code } from "../components/code";
import { Empty, ModelPicker, Problem } from "../components/parts";
import { readPictures } from "../components/pictures";
import { talkers } from "../session";
import { requestBody, streamAnswer } from "./answer";
import { conversations, current, currentId, remove, startNew, streams, titleOf, unsaved, update, type Message } from "./conversations";
import { MessageView } from "./message";
import { Settings } from "./chat_settings";

export function Chat() {
  const models = talkers();
  if (!models.length)
    return <Empty what="No language model is served." command="shoal serve hf:OpenVINO/Qwen2.5-0.5B-Instruct-int4-ov" />;
  return (
    <div class="chat">
      <Sidebar />
      <Thread models={models} />
    </div>
  );
}

function Sidebar() {
  const stored = conversations.value;
  return (
    <details class="sidebar card" open={matchMedia("(min-width: 60rem)").matches}>
      <summary>Conversations</summary>
      <button type="button" class="quiet" onClick={startNew}>
        New conversation
      </button>
      <ul>
        {stored.map((each) => (
          <li key={each.id}>
            <button
              type="button"
              class="plain"
              aria-current={each.id === currentId.value}
              onClick={() => (currentId.value = each.id)}
            >
              {titleOf(each)}
            </button>
            <button type="button" class="plain" aria-label={`Delete ${titleOf(each)}`} onClick={() => drop(each.id)}>
              ✕
            </button>
          </li>
        ))}
      </ul>
      <p class="facts">
        {unsaved.value ? "The browser's storage is full: delete old conversations." : "Kept in this browser only."}
      </p>
    </details>
  );
}

function drop(id: string): void {
  streams.value[id]?.abort();
  remove(id);
}

/** Replace the messages and stream the answer to the last of them. */
async function ask(messages: Message[], model: string, body: unknown): Promise<void> {
  const { id } = current();
  const control = new AbortController();
  streams.value = { ...streams.value, [id]: control };
  update(id, (old) => ({ ...old, model, messages: [...messages, { role: "assistant", text: "" }] }));
  await streamAnswer(id, body, control.signal);
  const { [id]: _, ...others } = streams.value;
  streams.value = others;
}

const isEmpty = (text: string, images: string[] = []): boolean => !text.trim() && !images.length;

function Thread({ models }: { models: Model[] }) {
  const conversation = current();
  const { messages } = conversation;
  const model = models.find(({ id }) => id === conversation.model) ?? (models[0] as Model);
  const stream = streams.value[conversation.id];
  const [problem, setProblem] = useState<string | null>(null);
  const log = useScrolledLog(messages, conversation.id);
  const send = (next: Message[]): boolean => {
    try {
      const body = requestBody({ ...current(), messages: next }, model.id);
      void ask(next, model.id, body);
      setProblem(null);
      return true;
    } catch (error) {
      setProblem((error as Error).message); // the tools are not JSON
      return false;
    }
  };
  return (
    <section class="thread" aria-label="Conversation">
      <div class="bar">
        <ModelPicker
          models={models}
          value={model.id}
          onPick={(id) => update(conversation.id, (old) => ({ ...old, model: id }))}
        />
      </div>
      <Settings conversation={conversation} />
      <div class="messages" role="log" aria-busy={stream !== undefined} aria-label="Messages" tabIndex={0} ref={log}>
        {!messages.length && <p class="facts welcome">Ask {model.id} something.</p>}
        {messages.map((message, i) => (
          <MessageView
            key={`${conversation.id}-${i}`}
            message={message}
            streaming={stream !== undefined && i === messages.length - 1}
            onRegenerate={stream || i < messages.length - 1 ? null : () => send(messages.slice(0, -1))}
            onEdit={
              stream
                ? null
                : (text) => !isEmpty(text, message.images) && send([...messages.slice(0, i), { ...message, text }])
            }
          />
        ))}
      </div>
      <Problem text={problem} />
      <Composer
        model={model}
        busy={stream !== undefined}
        onStop={() => stream?.abort()}
        onSend={(text, images) => send([...messages, { role: "user", text, ...(images.length ? { images } : {}) }])}
      />
      <Example model={model.id} />
    </section>
  );
}

/** The request that the next message makes, or that the last one made. */
function Example({ model }: { model: string }) {
  const conversation = current();
  const messages = [...conversation.messages];
  if (messages.at(-1)?.role === "assistant") messages.pop();
  if (!messages.length) messages.push({ role: "user", text: "Hello!" });
  try {
    const { stream_options: _, ...body } = requestBody({ ...conversation, messages }, model);
    return <Code example={{ path: "v1/chat/completions", body, client: "chat.completions.create" }} />;
  } catch {
    return null; // tools that are not JSON: sending says so
  }
}

const NEAR_END_PX = 80;

/** Keep the end in view while an answer grows, unless the reader has scrolled up. */
function useScrolledLog(messages: Message[], id: string) {
  const log = useRef<HTMLDivElement>(null);
  const shown = useRef("");
  useEffect(() => {
    const box = log.current;
    if (!box) return;
    const isNew = shown.current !== `${id} ${messages.length}`;
    shown.current = `${id} ${messages.length}`;
    if (isNew || box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END_PX) box.scrollTop = box.scrollHeight;
  }, [messages, id]);
  return log;
}

interface ComposerProps {
  model: Model;
  busy: boolean;
  onStop: () => void;
  /** Returns whether the message was sent. */
  onSend: (text: string, images: string[]) => boolean;
}

function Composer({ model, busy, onStop, onSend }: ComposerProps) {
  const [text, setText] = useState("");
  const [images, setImages] = useState<string[]>([]);
  const [problem, setProblem] = useState<string | null>(null);
  const send = (event: Event) => {
    event.preventDefault();
    if (busy || isEmpty(text, images) || !onSend(text, images)) return;
    setText("");
    setImages([]);
  };
  const add = async (input: HTMLInputElement) => {
    try {
      const read = await readPictures(input.files ?? []);
      setImages((old) => [...old, ...read]);
      setProblem(null);
    } catch (error) {
      setProblem((error as Error).message);
    }
    input.value = "";
  };
  return (
    <form class="composer card" onSubmit={send}>
      {images.length > 0 && (
        <div class="pictures">
          {images.map((url, i) => (
            <button
              key={i}
              type="button"
              class="plain"
              aria-label={`Remove picture ${i + 1}`}
              onClick={() => setImages(images.filter((_, j) => j !== i))}
            >
              <img src={url} alt="" />
            </button>
          ))}
        </div>
      )}
      <textarea
        aria-label="Message"
        rows={2}
        placeholder="Message (Enter sends, Shift+Enter starts a line)"
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
        }}
      />
      <Problem text={problem} />
      <div class="bar">
        {model.vision && (
          <label class="file button quiet">
            Add pictures
            <input type="file" accept="image/*" multiple onChange={(event) => void add(event.currentTarget)} />
          </label>
        )}
        {busy ? (
          <button type="button" class="stop" onClick={onStop}>
            Stop
          </button>
        ) : (
          <button type="submit">Send</button>
        )}
      </div>
    </form>
  );
}
