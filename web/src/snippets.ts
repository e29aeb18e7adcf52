// The request on screen as a command or program. Keys never appear, only the environment variable that holds one.

import { address } from "./api";

export interface Example {
  path: string;
  body: unknown;
  method?: "POST" | "GET" | "DELETE";
  /** The method of OpenAI's clients that sends this request. */
  client?: "embeddings.create" | "chat.completions.create";
}

export type Language = "curl" | "Python" | "JavaScript";
export const LANGUAGES: Language[] = ["curl", "Python", "JavaScript"];

export function write(language: Language, example: Example, locked: boolean): string {
  if (language === "curl") return curl(example, locked);
  return language === "Python" ? python(example, locked) : javascript(example, locked);
}

/** Shorten pictures, which no one reads. */
export const shorten = (code: string): string => code.replace(/;base64,[A-Za-z0-9+/=]{40,}/g, ";base64,…");

const LONGEST_ARGUMENT = 100_000; // Linux refuses arguments above 128 KiB

/** Return a text as one word of the shell. */
const quote = (text: string): string => `'${text.replaceAll("'", "'\\''")}'`;

function curl({ path, body, method = "POST" }: Example, locked: boolean): string {
  const start = [
    `curl ${method === "POST" ? "" : `-X ${method} `}${quote(address(path))}`,
    ...(locked ? ['  -H "authorization: Bearer $SHOAL_API_KEY"'] : []),
  ];
  if (method === "GET") return start.join(" \\\n");
  start.push("  -H 'content-type: application/json'");
  if (body === undefined) return start.join(" \\\n");
  const json = JSON.stringify(body, null, 2);
  if (json.length > LONGEST_ARGUMENT) return `${start.join(" \\\n")} \\\n  -d @- <<'EOF'\n${json}\nEOF`;
  return [...start, `  -d ${quote(json)}`].join(" \\\n");
}

function python({ path, body, method = "POST", client }: Example, locked: boolean): string {
  const begin = locked ? ["import os", ""] : [];
  if (client) {
    const key = locked ? 'os.environ["SHOAL_API_KEY"]' : '"none"';
    const streams = (body as { stream?: boolean }).stream;
    return [
      ...begin,
      "from openai import OpenAI",
      "",
      `client = OpenAI(base_url="${address("v1")}", api_key=${key})`,
      `reply = client.${client}(`,
      ...Object.entries(body as object).map(([name, value]) => `    ${name}=${pythonValue(value, "    ")},`),
      ")",
      ...(streams
        ? ["for chunk in reply:", "    if chunk.choices:", '        print(chunk.choices[0].delta.content or "", end="", flush=True)']
        : ["print(len(reply.data), reply.data[0].embedding[:4])"]),
    ].join("\n");
  }
  return [
    ...begin,
    "import requests",
    "",
    `reply = requests.${method.toLowerCase()}(`,
    `    "${address(path)}",`,
    ...(locked ? ['    headers={"authorization": "Bearer " + os.environ["SHOAL_API_KEY"]},'] : []),
    ...(method !== "GET" && body !== undefined ? [`    json=${pythonValue(body, "    ")},`] : []),
    ")",
    `print(reply.${path.startsWith("metrics") ? "text" : "json()"})`,
  ].join("\n");
}

function javascript({ path, body, method = "POST", client }: Example, locked: boolean): string {
  const json = JSON.stringify(body, null, 2);
  if (client) {
    const key = locked ? "process.env.SHOAL_API_KEY" : '"none"';
    const streams = (body as { stream?: boolean }).stream;
    return [
      'import OpenAI from "openai";',
      "",
      `const client = new OpenAI({ baseURL: "${address("v1")}", apiKey: ${key} });`,
      `const reply = await client.${client}(${json});`,
      streams
        ? 'for await (const chunk of reply) process.stdout.write(chunk.choices[0]?.delta.content ?? "");'
        : "console.log(reply.data.length, reply.data[0].embedding.slice(0, 4));",
    ].join("\n");
  }
  const headers = [
    ...(locked ? ["authorization: `Bearer ${process.env.SHOAL_API_KEY}`"] : []),
    ...(method === "GET" ? [] : ['"content-type": "application/json"']),
  ];
  return [
    `const reply = await fetch("${address(path)}", {`,
    `  method: "${method}",`,
    ...(headers.length ? [`  headers: { ${headers.join(", ")} },`] : []),
    ...(method !== "GET" && body !== undefined ? [`  body: JSON.stringify(${json.replaceAll("\n", "\n  ")}),`] : []),
    "});",
    `console.log(await reply.${path.startsWith("metrics") ? "text" : "json"}());`,
  ].join("\n");
}

function pythonValue(value: unknown, indent: string): string {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  const parts = Array.isArray(value)
    ? value.map((each) => pythonValue(each, inner))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${pythonValue(each, inner)}`);
  const line = `${open}${parts.join(", ")}${close}`;
  if (line.length + indent.length < 90) return line;
  return `${open}\n${parts.map((each) => `${inner}${each},\n`).join("")}${indent}${close}`;
}
