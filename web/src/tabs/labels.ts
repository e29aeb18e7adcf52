// Places for the labels of a map's points, so that none covers another.

export interface Label {
  text: string;
  x: number;
  y: number;
  /** The indices of the points that it names. */
  names: number[];
}

interface Box {
  left: number;
  right: number;
  top: number;
  bottom: number;
}

const NEAR = 7; // points closer than this touch each other, and share a label
const LISTED = 3; // numbers of a shared label
const GLYPH = 0.6; // width of a digit, as a share of the font's size
const GAP = 3; // between two labels
const RINGS = [9, 18]; // distances of a label from its point
const SIDES = [[1, -1], [-1, -1], [1, 1], [-1, 1], [1, 0], [-1, 0], [0, -1], [0, 1]] as const; // right of and above it first

/**
 * Return the labels of points, numbered from 1; text is centered at `x` with its middle at `y`. Points that touch share
 * a label. A label takes the first free place around its point; one that finds none is left out.
 */
export function placeLabels(points: [number, number][], size: number, width: number, height: number): Label[] {
  const taken: Box[] = points.map(([x, y]) => box(x, y, 4, 4));
  const labels: Label[] = [];
  for (const names of groupNear(points)) {
    const text = describe(names);
    const half: [number, number] = [(text.length * GLYPH * size + GAP) / 2, size / 2];
    const place = candidates(points[names[0] ?? 0] ?? [0, 0], half).find(({ x, y }) => {
      const wanted = box(x, y, ...half);
      return wanted.left >= 0 && wanted.right <= width && wanted.top >= 0 && wanted.bottom <= height && !taken.some((each) => overlap(each, wanted));
    });
    if (!place) continue;
    taken.push(box(place.x, place.y, ...half));
    labels.push({ text, names, ...place });
  }
  return labels;
}

/** Return the points as groups, each around its first point. */
function groupNear(points: [number, number][]): number[][] {
  const groups: number[][] = [];
  points.forEach(([x, y], i) => {
    const found = groups.find(([first = 0]) => Math.hypot((points[first]?.[0] ?? 0) - x, (points[first]?.[1] ?? 0) - y) < NEAR);
    if (found) found.push(i);
    else groups.push([i]);
  });
  return groups;
}

function describe(names: number[]): string {
  const listed = names.slice(0, LISTED).map((i) => i + 1).join(", ");
  return names.length > LISTED ? `${listed} +${names.length - LISTED}` : listed;
}

const candidates = ([x, y]: [number, number], [wide, high]: [number, number]) =>
  RINGS.flatMap((far) => SIDES.map(([right, down]) => ({ x: x + right * (wide + far * (down ? 0.6 : 1)), y: y + down * (high + far * 0.4) })));

const box = (x: number, y: number, wide: number, high: number): Box => ({ left: x - wide, right: x + wide, top: y - high, bottom: y + high });

const overlap = (a: Box, b: Box): boolean => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
