// The Vercel AI SDK: `node tool_choice.mjs BASE_URL MODEL PROVIDER STEPS`. Requires a tool call in each of its steps, whole
// and streamed, and prints the calls as a line of JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name, provider, steps] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "any" });
const models = {
  responses: () => openai.responses(name),
  chat: () => openai.chat(name),
  compatible: () => createOpenAICompatible({ name: "shoal", baseURL })(name),
};
const digit = z.number().int().min(0).max(9);
const options = {
  model: models[provider](),
  prompt: "Add 1 and 2",
  maxRetries: 0,
  stopWhen: stepCountIs(Number(steps)),
  toolChoice: "required",
  tools: {
    add: tool({
      description: "Adds two digits.",
      inputSchema: z.object({ a: digit, b: digit }),
      execute: async ({ a, b }) => a + b,
    }),
  },
};
const collect = (made) =>
  made.map(({ finishReason, toolCalls, toolResults }) => ({
    reason: finishReason,
    inputs: toolCalls.map(({ input }) => input),
    outputs: toolResults.map(({ output }) => output),
  }));
const whole = await generateText(options);
const stream = streamText({ ...options, onError: ({ error }) => console.error(error) });
console.log(JSON.stringify({ whole: collect(whole.steps), streamed: collect(await stream.steps) }));
