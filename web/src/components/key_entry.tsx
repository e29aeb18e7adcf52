import { useState } from "preact/hooks";

import { key } from "../api";
import { locked, setKey } from "../session";

const NOT_SENDABLE = /[^\x20-\xff]/; // as the value of an HTTP header

export function KeyEntry({ onDone }: { onDone: () => void }) {
  const [value, setValue] = useState(key.get());
  const [refusal, setRefusal] = useState("");
  const use = async (event: Event) => {
    event.preventDefault();
    if (NOT_SENDABLE.test(value.trim())) return setRefusal("No request can carry a character of this key: copy it again.");
    await setKey(value.trim());
    setRefusal(locked.value && value.trim() ? "The server does not accept this key." : "");
    if (!locked.value) onDone();
  };
  return (
    <form class="card key" onSubmit={use}>
      <label>
        {locked.value ? "This server requires an API key" : "API key"}
        <input
          type="password"
          autocomplete="off"
          value={value}
          aria-describedby="key-note"
          onInput={(event) => setValue(event.currentTarget.value)}
        />
      </label>
      <button type="submit">Use key</button>
      <p id="key-note" class={refusal ? "problem" : "facts"} role={refusal ? "alert" : undefined}>
        {refusal ||
          "Stored in this browser tab only, and forgotten when you close it. Changing models needs an admin key."}
      </p>
    </form>
  );
}
