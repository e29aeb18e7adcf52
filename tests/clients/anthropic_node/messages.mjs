// Anthropic's TypeScript client: `node messages.mjs BASE_URL MODEL`. The model repeats its input, parses tool calls and
// reasoning, and fails at the word "poison".
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [baseURL, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey: "any", maxRetries: 0, timeout: 60_000 });
const HEARD = "one two three";
const CALLED = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>';
const tools = [{ name: "add", description: "Adds", input_schema: { type: "object", properties: {} } }];
let failures = 0;

async function check(name, body) {
  try {
    await body();
    console.log(`ok anthropic-sdk-typescript ${name}`);
  } catch (error) {
    failures += 1;
    console.log(`FAILED anthropic-sdk-typescript ${name}: ${error.stack}`);
  }
}

function ask(content, more = {}) {
  return { model, max_tokens: 64, messages: [{ role: "user", content }], ...more };
}

await check("message", async () => {
  const message = await client.messages.create(ask(HEARD));
  assert.deepEqual(message.content, [{ type: "text", text: HEARD }]);
  assert.equal(message.stop_reason, "end_turn");
  assert.equal(message.usage.output_tokens, 3);
  assert.ok(message._request_id);
});
await check("stream", async () => {
  let text = "";
  for await (const event of await client.messages.create(ask(HEARD, { stream: true }))) {
    if (event.type === "content_block_delta") text += event.delta.text;
  }
  assert.equal(text, HEARD);
});
await check("stream helper with thinking and tools", async () => {
  const thinking = { type: "enabled", budget_tokens: 1024 };
  const stream = client.messages.stream(ask(`<think>so</think>Adding.${CALLED}`, { tools, thinking }));
  const pieces = [];
  stream.on("inputJson", (piece) => pieces.push(piece));
  const message = await stream.finalMessage();
  const [thought, said, call] = message.content;
  assert.equal(thought.thinking, "so");
  assert.equal(said.text.trim(), "Adding.");
  assert.deepEqual([call.type, call.name, call.input], ["tool_use", "add", { a: 1 }]);
  assert.equal(message.stop_reason, "tool_use");
  assert.equal(message.usage.input_tokens > 0, true);
  assert.deepEqual(JSON.parse(pieces.join("")), { a: 1 });
});
await check("tool results", async () => {
  const messages = [
    { role: "user", content: "add" },
    { role: "assistant", content: [{ type: "tool_use", id: "toolu_1", name: "add", input: { a: 1 } }] },
    { role: "user", content: [{ type: "tool_result", tool_use_id: "toolu_1", content: "three" }] },
  ];
  const message = await client.messages.create({ model, max_tokens: 64, messages, tools });
  assert.equal(message.content[0].text, "three");
});
await check("beta", async () => {
  const message = await client.beta.messages.create(ask(HEARD, { betas: ["context-management-2025-06-27"] }));
  assert.equal(message.content[0].text, HEARD);
});
await check("count of tokens", async () => {
  const { input_tokens } = await client.messages.countTokens({ model, messages: ask(HEARD).messages });
  assert.equal(input_tokens > 0, true);
});
await check("models", async () => {
  const names = [];
  for await (const each of client.models.list()) names.push(each.id);
  assert.ok(names.includes(model));
  assert.equal((await client.models.retrieve(model)).display_name, model);
});
await check("broken stream", async () => {
  const stream = client.messages.stream(ask("one two poison three"));
  await assert.rejects(stream.finalMessage(), Anthropic.APIError);
});
await check("unknown model", () =>
  assert.rejects(client.messages.create({ ...ask(HEARD), model: "none" }), Anthropic.NotFoundError),
);
process.exit(failures ? 1 : 0);
