import SwaggerUI from "swagger-ui-dist/swagger-ui-es-bundle.js";
import "swagger-ui-dist/swagger-ui.css";

import { address, key } from "./api";
import "./docs.css";

const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", paint);
paint();

const root = document.getElementById("docs");
root?.replaceChildren();
const ui = SwaggerUI({
  url: address("openapi.json"),
  domNode: root,
  deepLinking: true,
  displayRequestDuration: true,
  validatorUrl: null, // the default calls a public validator; these pages call only this server
  tryItOutEnabled: true,
  onComplete: () => {
    if (key.get()) ui.preauthorizeApiKey("key", key.get());
  },
});
