import { update, type Conversation, type Parameters } from "./conversations";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "max_tokens", label: "Maximum tokens", min: 1, max: undefined, step: 1 },
  { name: "seed", label: "Seed", min: 0, max: undefined, step: 1 },
] as const;

/** System prompt, sampling and tools of a conversation. Empty fields leave the model's own values. */
export function Settings({ conversation }: { conversation: Conversation }) {
  const set = (change: Partial<Parameters>) => update(conversation.id, (old) => ({ ...old, ...change }));
  return (
    <details class="settings card">
      <summary>System prompt, parameters and tools</summary>
      <label>
        System prompt
        <textarea rows={2} value={conversation.system} onInput={(event) => set({ system: event.currentTarget.value })} />
      </label>
      <div class="numbers">
        {NUMBERS.map(({ name, label, min, max, step }) => (
          <label key={name}>
            {label}
            <input
              type="number"
              min={min}
              {...(max === undefined ? {} : { max })}
              step={step}
              placeholder="default"
              value={conversation[name]}
              onInput={(event) => set({ [name]: event.currentTarget.value })}
            />
          </label>
        ))}
      </div>
      <label>
        Tools, a JSON list in OpenAI's form. The page shows calls and does not run them.
        <textarea
          class="mono"
          rows={2}
          spellcheck={false}
          value={conversation.tools}
          onInput={(event) => set({ tools: event.currentTarget.value })}
        />
      </label>
    </details>
  );
}
