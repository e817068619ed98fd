// @ts-check
// Formats numbers as splitkit/units.py does.

/**
 * @param {number} value
 * @param {number} base
 * @param {string[]} units
 */
function scaled(value, base, units) {
  let power = 0;
  while (Math.abs(value) >= base * 0.9995 && power < units.length - 1) { value /= base; power++; }
  const whole = power === 0 && Number.isInteger(value);
  return `${fixed(value, whole || Math.abs(value) >= 100 ? 0 : 2)} ${units[power]}`.trimEnd();
}
/**
 * Round as Python does: a tie goes to the even digit, unlike with toFixed.
 * @param {number} value
 * @param {number} digits
 */
function fixed(value, digits) {
  const long = value.toFixed(99), at = long.indexOf(".") + digits + (digits ? 1 : 0), low = long.slice(0, at);
  return /^\.?50*$/.test(long.slice(at)) && "02468".includes(low.slice(-1)) ? low : value.toFixed(digits);
}
/** @param {number} bytes */
export function size(bytes) { return bytes >= 0 ? scaled(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]) : "–"; }
/**
 * Bytes from a text such as "80GiB" or "1.5 GB", as splitkit.checks reads it; null for an empty text, NaN for no size.
 * @param {string} text
 */
export function bytesOf(text) {
  const told = text.trim();
  if (!told) return null;
  const found = /^(\d+(?:\.\d+)?)\s*(?:([kmgtp])(i?)b|b)?$/i.exec(told);
  return found ? Math.floor(Number(found[1]) * (found[2] ? (found[3] ? 1024 : 1000) ** ("kmgtp".indexOf(found[2].toLowerCase()) + 1) : 1)) : NaN;
}
/**
 * A change with its sign, in percent.
 * @param {number} change 0.1 for 10 % more
 */
export const percent = change => `${change >= 0 ? "+" : ""}${(100 * change).toFixed(1)} %`;
/** @type {[number, string][]} */
const TIMES = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"], [1e-12, "ps"]];
/**
 * What a unit measures.
 * @param {string} unit
 */
export function measure(unit) { return unit === "s" ? "time" : unit === "TFLOP" ? "FLOPs" : unit; }
/**
 * @param {number} s
 * @param {string} unit
 */
export function duration(s, unit) {
  if (unit === "TFLOP") return scaled(Math.round(s * 1e14) / 100, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]);
  if (unit !== "s") return `${scaled(s, 1000, ["", "k", "M", "G", "T", "P"])} ${unit}`;
  for (const [scale, name] of TIMES)
    if (Math.abs(s) >= scale * 0.9995) {
      const [number, of] = [s / scale, Math.abs(s / scale)];
      return `${Number(fixed(number, of < 9.995 ? 2 : of < 99.95 ? 1 : 0))} ${name}`;
    }
  return s ? `${Number((s / 1e-12).toPrecision(2))} ps` : "0 us";
}
