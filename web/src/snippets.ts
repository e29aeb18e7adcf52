import { address } from "./api";

// Examples never contain the key, only the environment variable that holds it.

function post(path: string, body: string, locked: boolean): string {
  return [
    `curl ${address(path)} \\`,
    ...(locked ? ['  -H "authorization: Bearer $SHOAL_API_KEY" \\'] : []),
    "  -H 'content-type: application/json' \\",
    `  -d '${body}'`,
  ].join("\n");
}

function client(locked: boolean): string[] {
  return [
    ...(locked ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${address("v1")}", api_key=${locked ? 'os.environ["SHOAL_API_KEY"]' : '"none"'})`,
  ];
}

export const curl = (model: string, locked: boolean): string =>
  post("v1/embeddings", `{"model": "${model}", "input": ["a shoal of fish"]}`, locked);

export const curlChat = (model: string, locked: boolean): string =>
  post("v1/chat/completions", `{"model": "${model}", "messages": [{"role": "user", "content": "Hello!"}]}`, locked);

export const curlRank = (model: string, locked: boolean): string =>
  post("v1/rerank", `{"model": "${model}", "query": "What swims?", "documents": ["A fish.", "A stone."]}`, locked);

export const curlClassify = (model: string, locked: boolean): string =>
  post("classify", `{"model": "${model}", "input": ["a shoal of fish"]}`, locked);

export function python(model: string, locked: boolean): string {
  return [
    ...client(locked),
    "reply = client.embeddings.create(",
    `    model="${model}",`,
    '    input=["a shoal of fish"],',
    ")",
    "print(reply.data[0].embedding[:4])",
  ].join("\n");
}

export function pythonChat(model: string, locked: boolean): string {
  return [
    ...client(locked),
    "reply = client.chat.completions.create(",
    `    model="${model}",`,
    '    messages=[{"role": "user", "content": "Hello!"}],',
    "    stream=True,",
    ")",
    "for chunk in reply:",
    '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n");
}
