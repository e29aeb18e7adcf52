import { address } from "./api";

// A key is never written out: the examples name the variable that holds it.

export function curl(model: string, locked: boolean): string {
  return [
    `curl ${address("v1/embeddings")} \\`,
    ...(locked ? ['  -H "authorization: Bearer $SHOAL_API_KEY" \\'] : []),
    "  -H 'content-type: application/json' \\",
    `  -d '{"model": "${model}", "input": ["a shoal of fish"]}'`,
  ].join("\n");
}

export function python(model: string, locked: boolean): string {
  return [
    ...(locked ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${address("v1")}", api_key=${locked ? 'os.environ["SHOAL_API_KEY"]' : '"none"'})`,
    "reply = client.embeddings.create(",
    `    model="${model}",`,
    '    input=["a shoal of fish"],',
    ")",
    "print(reply.data[0].embedding[:4])",
  ].join("\n");
}
