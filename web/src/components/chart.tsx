// A chart over time, drawn by uPlot, which sizes to its box and follows the color scheme.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

export interface Line {
  label: string;
  /** One value for each time; null where nothing was measured. */
  values: (number | null)[];
}

interface ChartProps {
  title: string;
  times: number[];
  lines: Line[];
  format: (value: number) => string;
}

const HEIGHT = 160;
const COLORS = ["--chart-1", "--chart-2", "--chart-3"];
const dark = matchMedia("(prefers-color-scheme: dark)");

const color = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function Chart({ title, times, lines, format }: ChartProps) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const data = [times, ...lines.map(({ values }) => values)] as uPlot.AlignedData;
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    const root = box.current;
    if (!root) return;
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(lines, format, root.clientWidth), latest.current, root);
    };
    draw();
    const resize = new ResizeObserver(() => plot.current?.setSize({ width: root.clientWidth, height: HEIGHT }));
    resize.observe(root);
    dark.addEventListener("change", draw);
    return () => {
      resize.disconnect();
      dark.removeEventListener("change", draw);
      plot.current?.destroy();
    };
  }, []);
  useEffect(() => plot.current?.setData(data));
  const now = lines.map(({ label, values }) => ({ label, value: values.at(-1) ?? null }));
  return (
    <section class="card chart" aria-label={title}>
      <h2>{title}</h2>
      <p class="legend">
        {now.map(({ label, value }, i) => (
          <span key={label}>
            <span class={`swatch c${i + 1}`} aria-hidden="true" /> {label} <strong>{value === null ? "–" : format(value)}</strong>
          </span>
        ))}
      </p>
      <div ref={box} class="plot" aria-hidden="true" />
    </section>
  );
}

const clock = (at: number): string => new Date(at * 1000).toLocaleTimeString("en-GB");

function options(lines: Line[], format: (value: number) => string, width: number): uPlot.Options {
  const axis: uPlot.Axis = {
    stroke: color("--soft"),
    grid: { stroke: color("--line"), width: 1 },
    ticks: { show: false },
    font: "12px system-ui, sans-serif",
  };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: { y: { range: (_, __, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [{ ...axis, size: 28, space: 90, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 64, values: (_, ticks) => ticks.map(format) }],
    series: [
      {},
      ...lines.map(({ label }, i) => ({
        label,
        stroke: color(COLORS[i] ?? "--accent"),
        width: 2,
        points: { show: false },
        spanGaps: true,
      })),
    ],
  };
}
