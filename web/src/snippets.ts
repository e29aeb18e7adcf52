import { address } from "./api";

export function curl(model: string): string {
  return [
    `curl ${address("v1/embeddings")} \\`,
    `  -H 'content-type: application/json' \\`,
    `  -d '{"model": "${model}", "input": ["a shoal of fish"]}'`,
  ].join("\n");
}

export function python(model: string): string {
  return [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${address("v1")}", api_key="none")`,
    "reply = client.embeddings.create(",
    `    model="${model}",`,
    `    input=["a shoal of fish"],`,
    ")",
    "print(reply.data[0].embedding[:4])",
  ].join("\n");
}
