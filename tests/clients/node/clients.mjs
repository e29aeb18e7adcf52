// openai-node: `node clients.mjs BASE_URL MODEL`.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0, timeout: 60_000 });
const HEARD = "one two three";
const BREAKS = "one two poison three";
let failures = 0;

async function check(name, body) {
  try {
    await body();
    console.log(`ok openai-node ${name}`);
  } catch (error) {
    failures += 1;
    console.log(`FAILED openai-node ${name}: ${error}`);
  }
}

async function heard(text) {
  const messages = [{ role: "user", content: text }];
  const options = { stream: true, stream_options: { include_usage: true } };
  let whole = "";
  for await (const chunk of await client.chat.completions.create({ model, messages, ...options })) {
    whole += chunk.choices[0]?.delta.content ?? "";
  }
  return whole;
}

await check("models", async () => {
  const names = (await client.models.list()).data.map((each) => each.id);
  assert(names.includes(model));
  assert.equal((await client.models.retrieve(model)).id, model);
});
await check("chat", async () => {
  const answer = await client.chat.completions.create({ model, messages: [{ role: "user", content: HEARD }] });
  assert.equal(answer.choices[0].message.content, HEARD);
});
await check("chat stream", async () => assert.equal(await heard(HEARD), HEARD));
await check("broken chat stream", () => assert.rejects(heard(BREAKS), OpenAI.APIError));
await check("stream helper", async () => {
  const stream = client.chat.completions.stream({ model, messages: [{ role: "user", content: BREAKS }] });
  await assert.rejects(stream.finalContent());
});
await check("embeddings", async () => {
  assert.equal((await client.embeddings.create({ model, input: HEARD })).data.length, 1);
});
await check("responses", async () => {
  assert.equal((await client.responses.create({ model, input: HEARD })).output_text, HEARD);
});
process.exit(failures ? 1 : 0);
