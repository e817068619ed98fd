// @ts-check
// Sums and look-ups that several scripts need.

/** @param {number[]} numbers */
export const sum = numbers => numbers.reduce((a, b) => a + b, 0);
/**
 * The value of a key that is in a map, which TypeScript cannot know.
 * @template K, V
 * @param {Map<K, V>} table
 * @param {K} key
 * @returns {V}
 */
export const known = (table, key) => /** @type {V} */ (table.get(key));
/**
 * A limit, or 0 if it is so high that drawing it would flatten the chart; as visible_limit of view/svg/scatter.py.
 * @param {number | null} limit
 * @param {number} most
 */
export const near = (limit, most) => limit && limit <= 3 * most ? limit : 0;
/**
 * Sum [from row, to row, bytes] by item: [from item, to item, bytes].
 * @param {Triple[]} triples
 * @param {Item[]} itemOf
 * @param {boolean} [up] whether those count that go up
 * @returns {Triple[]}
 */
export function merge(triples, itemOf, up = false) {
  const items = [...new Set(itemOf)], place = new Map(items.map((item, i) => [item, i]));
  /** @type {Map<number, number>} */
  const found = new Map();
  for (const [from, to, nbytes] of triples) {
    const key = known(place, itemOf[from]) * items.length + known(place, itemOf[to]);
    found.set(key, (found.get(key) || 0) + nbytes);
  }
  return [...found].map(([key, nbytes]) => /** @type {Triple} */ ([Math.floor(key / items.length), key % items.length, nbytes])).filter(([a, b]) => up || a <= b);
}
