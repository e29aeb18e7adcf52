// An MCP server with one tool, over standard input and output.
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { StdioServerTransport } from "@modelcontextprotocol/sdk/server/stdio.js";
import { z } from "zod";

const server = new McpServer({ name: "sums", version: "1" });
const inputSchema = { a: z.number(), b: z.number() };
server.registerTool("add", { description: "Adds two numbers.", inputSchema }, async ({ a, b }) => ({
  content: [{ type: "text", text: `the sum is ${a + b}` }],
}));
await server.connect(new StdioServerTransport());
