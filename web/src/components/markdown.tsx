// Markdown of a model as elements. Only marked's parser is used: its tokens become Preact elements, whose texts the
// browser never reads as HTML, so there is nothing to sanitize. HTML in an answer is shown as text.

import { lexer, type Token, type Tokens } from "marked";
import type { ComponentChildren, VNode } from "preact";
import { useMemo } from "preact/hooks";

import { CopyButton } from "./code";

export function Markdown({ text }: { text: string }) {
  const content = useMemo(() => read(text), [text]); // an answer that streams renders all others again
  return <div class="markdown">{content}</div>;
}

const MAX_DEPTH = 50; // parsing and rendering recurse: what nests deeper is shown as text

function read(text: string): ComponentChildren {
  try {
    const tokens = lexer(text);
    if (!nests(tokens, MAX_DEPTH)) return blocks(tokens);
  } catch (error) {
    if (!(error instanceof RangeError)) console.warn("Markdown that cannot be read is shown as text:", error);
  }
  return <p class="raw">{text}</p>;
}

/** Whether tokens lie within each other on more than `levels` levels. */
function nests(tokens: Token[], levels: number): boolean {
  const inner = (token: Tokens.Generic): Token[] => (token.items as Token[] | undefined) ?? token.tokens ?? [];
  return tokens.length > 0 && (levels < 0 || tokens.some((each) => nests(inner(each), levels - 1)));
}

const blocks = (tokens: Token[] | undefined): ComponentChildren[] => (tokens ?? []).map((each, i) => block(each, i));

function block(token: Token, key: number): ComponentChildren {
  switch (token.type) {
    case "heading": {
      const { depth, tokens } = token as Tokens.Heading;
      // The page's own headings are of the first and second level.
      const Name = `h${Math.min(6, depth + 2)}` as "h3";
      return <Name key={key}>{inlines(tokens)}</Name>;
    }
    case "paragraph":
      return <p key={key}>{inlines((token as Tokens.Paragraph).tokens)}</p>;
    case "code":
      return codeBlock(token as Tokens.Code, key);
    case "blockquote":
      return <blockquote key={key}>{blocks((token as Tokens.Blockquote).tokens)}</blockquote>;
    case "list":
      return list(token as Tokens.List, key);
    case "table":
      return table(token as Tokens.Table, key);
    case "hr":
      return <hr key={key} />;
    case "space":
    case "def":
      return null;
    case "text":
      return <span key={key}>{inline(token, key)}</span>;
    default:
      return <p key={key}>{token.raw}</p>;
  }
}

function codeBlock({ text, lang }: Tokens.Code, key: number): VNode {
  return (
    <figure class="code-block" key={key}>
      <figcaption>
        {lang || "code"}
        <CopyButton label="Copy the code" text={() => text} />
      </figcaption>
      <pre tabIndex={0}>
        <code>{text}</code>
      </pre>
    </figure>
  );
}

function list({ ordered, start, items }: Tokens.List, key: number): VNode {
  const entries = items.map((item, i) => (
    <li key={i}>
      {item.task && <input type="checkbox" checked={item.checked ?? false} disabled aria-label="Done" />}
      {blocks(item.tokens.filter((each) => each.type !== "checkbox"))}
    </li>
  ));
  return ordered ? (
    <ol key={key} start={start || 1}>
      {entries}
    </ol>
  ) : (
    <ul key={key}>{entries}</ul>
  );
}

function table({ header, rows }: Tokens.Table, key: number): VNode {
  return (
    <div class="wide" key={key} tabIndex={0} role="region" aria-label="Table">
      <table>
        <thead>
          <tr>
            {header.map((cell, i) => (
              <th key={i}>{inlines(cell.tokens)}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row, i) => (
            <tr key={i}>
              {row.map((cell, j) => (
                <td key={j}>{inlines(cell.tokens)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const inlines = (tokens: Token[] | undefined): ComponentChildren[] => (tokens ?? []).map((each, i) => inline(each, i));

function inline(token: Token, key: number): ComponentChildren {
  switch (token.type) {
    case "strong":
      return <strong key={key}>{inlines((token as Tokens.Strong).tokens)}</strong>;
    case "em":
      return <em key={key}>{inlines((token as Tokens.Em).tokens)}</em>;
    case "del":
      return <del key={key}>{inlines((token as Tokens.Del).tokens)}</del>;
    case "codespan":
      return <code key={key}>{(token as Tokens.Codespan).text}</code>;
    case "br":
      return <br key={key} />;
    case "link":
      return link(token as Tokens.Link, key);
    case "image": // Shown as its text: nothing is loaded from elsewhere.
      return `[${(token as Tokens.Image).text || "picture"}]`;
    case "escape":
      return (token as Tokens.Escape).text;
    case "text": {
      const { tokens, text } = token as Tokens.Text;
      return tokens ? inlines(tokens) : decode(text);
    }
    default:
      return token.raw;
  }
}

function link({ href, tokens }: Tokens.Link, key: number): ComponentChildren {
  if (!/^(https?:|mailto:)/i.test(href)) return inlines(tokens); // no javascript: and no address of this server
  return (
    <a key={key} href={href} target="_blank" rel="noopener noreferrer">
      {inlines(tokens)}
    </a>
  );
}

const ENTITIES: Record<string, string> = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", nbsp: "\u00a0" };

/** Decode the entities that models write; all others stay as they are. */
const decode = (text: string): string => text.replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (_, name: string) => ENTITIES[name] ?? _);
