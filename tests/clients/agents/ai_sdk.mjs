// The Vercel AI SDK: `node ai_sdk.mjs BASE_URL MODEL PROVIDER STORE`. Runs an agent with a tool, and prints a line of JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name, provider, store] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "any" });
const models = {
  default: () => openai(name),
  responses: () => openai.responses(name),
  chat: () => openai.chat(name),
  compatible: () => createOpenAICompatible({ name: "shoal", baseURL })(name),
};
const options = {
  model: models[provider](),
  prompt: "Add 1 and 2, then 3",
  maxRetries: 0,
  providerOptions: {
    openai: { forceReasoning: true, reasoningSummary: "auto", ...(store === "off" ? { store: false } : {}) },
  },
  stopWhen: stepCountIs(5),
  tools: {
    add: tool({
      description: "Adds two numbers.",
      inputSchema: z.object({ a: z.number(), b: z.number() }),
      execute: async ({ a, b }) => `the sum is ${a + b}`,
    }),
  },
};
const whole = await generateText(options);
const stream = streamText({ ...options, onError: ({ error }) => console.error(error) });
const streamed = await stream.text;
const reasoning = (await stream.steps).map((step) => step.reasoningText ?? "").join("");
console.log(JSON.stringify({ text: whole.text, steps: whole.steps.length, streamed, reasoning }));
