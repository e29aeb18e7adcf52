export interface Ranked {
  text: string;
  score: number;
}

/** Texts with their scores, best first, and bars from the lowest score or 0 to the highest or 1. */
export function Ranking({ ranked }: { ranked: Ranked[] }) {
  const scores = ranked.map(({ score }) => score);
  const low = Math.min(0, ...scores);
  const high = Math.max(1, ...scores);
  return (
    <ol class="ranking">
      {ranked.map(({ text, score }, i) => (
        <li key={i}>
          <span class="score">{score.toFixed(4)}</span>
          <span class="ranked">
            {text}
            <span class="track">
              <span class="fill" style={{ width: `${(100 * (score - low)) / (high - low)}%` }} />
            </span>
          </span>
        </li>
      ))}
    </ol>
  );
}
