import { defineConfig } from "vite";

// Every page is one HTML file at the top, so that "./assets" is right wherever Shoal is mounted. The content security
// policy allows no inline script or data: URL for code, hence no inlined assets and no module-preload polyfill.
export default defineConfig({
  base: "./",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 2000,
    license: { fileName: "licenses.md" },
    rolldownOptions: { input: ["index.html", "docs.html"] },
  },
  server: {
    proxy: Object.fromEntries(
      ["/v1", "/openapi.json", "/metrics", "/models", "/jobs", "/api", "/rank"].map((path) => [path, "http://127.0.0.1:8080"]),
    ),
  },
});
