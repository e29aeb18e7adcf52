// Streams one answer of /v1/chat/completions into the last message of a conversation.

import { errorMessage, post, UNREACHABLE } from "../api";
import { updateLast, type Conversation, type Message, type ToolCall } from "./conversations";

interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
}

interface Chunk {
  choices?: { delta?: Delta; finish_reason?: string | null }[];
  usage?: { prompt_tokens: number; completion_tokens: number } | null;
}

/** Return the body of the request for the next answer. Throws an Error if the tools are not JSON. */
export function requestBody(conversation: Conversation, model: string): Record<string, unknown> {
  const { system, tools, messages, ...numbers } = conversation;
  const body: Record<string, unknown> = {
    model,
    messages: [...(system.trim() ? [{ role: "system", content: system }] : []), ...messages.flatMap(wireMessages)],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"] as const)
    if (numbers[name].trim()) body[name] = Number(numbers[name]);
  if (tools.trim()) body.tools = parseTools(tools);
  return body;
}

function parseTools(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools must be a JSON list in OpenAI's form: ${(error as Error).message}`);
  }
}

/** The page runs no tools: a call without a result would be refused, so it goes back as text. */
function wireMessages({ role, text, images, calls }: Message): unknown[] {
  if (role === "assistant") {
    const content = [text, ...(calls ?? []).map((each) => `${each.name}(${each.arguments})`)].join("\n").trim();
    return content ? [{ role, content }] : [];
  }
  if (!images?.length) return [{ role, content: text }];
  const pictures = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return [{ role, content: [...(text ? [{ type: "text", text }] : []), ...pictures] }];
}

/** Fill the conversation's last message, an empty one of the assistant, until the answer ends or `signal` aborts. */
export async function streamAnswer(id: string, body: unknown, signal: AbortSignal): Promise<void> {
  const begun = performance.now();
  let first = 0;
  let last = 0;
  try {
    const response = await post("v1/chat/completions", body, signal);
    const ignored = response.headers.get("x-shoal-ignored");
    if (ignored) updateLast(id, (old) => ({ ...old, ignored }));
    for await (const chunk of readEvents(response)) {
      const choice = chunk.choices?.[0];
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice?.delta ?? {};
      if (content || reasoning || calls) {
        last = performance.now();
        first ||= last;
      }
      updateLast(id, (old) => ({
        ...old,
        text: old.text + (content ?? ""),
        ...(reasoning ? { reasoning: (old.reasoning ?? "") + reasoning } : {}),
        ...(calls ? { calls: addCalls(old.calls ?? [], calls) } : {}),
        ...(choice?.finish_reason === "length" ? { ended: "length" as const } : {}),
        ...(chunk.usage ? { stats: statistics(chunk.usage, begun, first, last) } : {}),
      }));
    }
  } catch (error) {
    if (signal.aborted) updateLast(id, (old) => ({ ...old, ended: "stopped" }));
    // A connection that breaks within an answer is a TypeError of the browser's, in its own words.
    else updateLast(id, (old) => ({ ...old, error: error instanceof TypeError ? UNREACHABLE : (error as Error).message }));
  }
}

/** `perSecond` counts the tokens after the first, over the time that they took. */
function statistics(usage: NonNullable<Chunk["usage"]>, begun: number, first: number, last: number) {
  const tokens = usage.completion_tokens;
  return {
    tokens,
    promptTokens: usage.prompt_tokens,
    firstMs: first ? first - begun : 0,
    perSecond: tokens > 1 && last > first ? ((tokens - 1) * 1000) / (last - first) : null,
  };
}

function addCalls(old: ToolCall[], deltas: NonNullable<Delta["tool_calls"]>): ToolCall[] {
  const calls = [...old];
  for (const { index, id, function: part } of deltas) {
    const before = calls[index] ?? { id: "", name: "", arguments: "" };
    calls[index] = {
      id: id ?? before.id,
      name: before.name + (part?.name ?? ""),
      arguments: before.arguments + (part?.arguments ?? ""),
    };
  }
  return calls;
}

/** Yield the objects of a stream of server-sent events. Throws an Error for an error event or a stream cut short. */
async function* readEvents(response: Response): AsyncGenerator<Chunk> {
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (reader) {
    const { done, value } = await reader.read();
    if (done) break;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop() ?? "";
    for (const part of parts) {
      const data = /(?:^|\n)data: ?([^\r\n]*)/.exec(part)?.[1]; // "." and "$" would end at U+2028
      if (data === "[DONE]") return;
      if (data === undefined) continue; // a comment, which keeps the connection open
      const chunk: unknown = JSON.parse(data);
      const message = errorMessage(chunk);
      if (message) throw new Error(message);
      yield chunk as Chunk;
    }
  }
  throw new Error("The answer broke off: the server ended the stream early. Try again.");
}
