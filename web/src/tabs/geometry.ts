// Cosines of vectors, and their places on a map.

export function cosines(vectors: number[][]): number[][] {
  const units = vectors.map(normalize);
  return units.map((a) => units.map((b) => dot(a, b)));
}

function normalize(vector: number[]): number[] {
  const length = Math.sqrt(dot(vector, vector)) || 1;
  return vector.map((x) => x / length);
}

function dot(a: number[], b: number[]): number {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += (a[i] ?? 0) * (b[i] ?? 0);
  return sum;
}

export interface Pair {
  a: number;
  b: number;
  cosine: number;
}

/** Return the `count` most similar pairs of different rows, the best first. */
export function nearestPairs(matrix: number[][], count: number): Pair[] {
  const pairs = matrix.flatMap((row, a) => row.slice(a + 1).map((cosine, i) => ({ a, b: a + 1 + i, cosine })));
  return pairs.sort((x, y) => y.cosine - x.cosine).slice(0, count);
}

/**
 * Principal component analysis: return each vector's [x, y] on the two axes of largest variance, and the shares of the
 * variance that they show. The axes come from the n x n Gram matrix of the centered vectors, whose eigenvectors, scaled
 * by the roots of their eigenvalues, are the coordinates.
 */
export function project(vectors: number[][]): { points: [number, number][]; shares: [number, number] } {
  const gram = centeredGram(vectors);
  const total = gram.reduce((sum, row, i) => sum + (row[i] ?? 0), 0) || 1;
  const [x, first] = dominant(gram);
  const rest = gram.map((row, i) => row.map((value, j) => value - first * (x[i] ?? 0) * (x[j] ?? 0)));
  const [y, second] = dominant(rest);
  const points = vectors.map((_, i): [number, number] => [
    (x[i] ?? 0) * Math.sqrt(first),
    (y[i] ?? 0) * Math.sqrt(second),
  ]);
  return { points, shares: [first / total, second / total] };
}

function centeredGram(vectors: number[][]): number[][] {
  const mean = (vectors[0] ?? []).map((_, k) => vectors.reduce((sum, v) => sum + (v[k] ?? 0), 0) / vectors.length);
  const centered = vectors.map((vector) => vector.map((value, k) => value - (mean[k] ?? 0)));
  return centered.map((a) => centered.map((b) => dot(a, b)));
}

const ITERATIONS = 200;

/** Return the unit eigenvector of the largest eigenvalue of a positive semidefinite matrix, by power iteration. */
function dominant(matrix: number[][]): [number[], number] {
  let vector = normalize(matrix.map((_, i) => Math.sin(i + 1))); // not orthogonal to it by design, as a constant one is
  for (let i = 0; i < ITERATIONS; i++) vector = normalize(matrix.map((row) => dot(row, vector)));
  const value = dot(vector, matrix.map((row) => dot(row, vector)));
  return [vector, Math.max(0, value)];
}
