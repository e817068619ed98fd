// @ts-check
// Lets users take home what they see: the picture as a PNG, and a plan with the borders as they are now as plan.json.

/** @typedef {import("./ladder.js").Ladder} Ladder */

/**
 * The plan file of the borders as they are now, as `splitkit.Plan.load` and the command line read it.
 * @param {Ladder} p
 */
export function planFile(p) {
  const {data, borders, ops} = p, {plan} = data, count = borders.length - 1, own = count === plan.parts.length;
  const parts = own ? plan.parts : [...Array(count).keys()].map(key => ({key, device: null, call: p.isAgain(0) ? "checkpoint" : "plain"}));
  const places = Object.fromEntries(ops.name.map((name, op) => [name, [p.stageOf(ops.row[op])]]));
  return {...plan, nodes: [], note: p.isShipped ? data.note : `${count} stages${p.how}`, claim: null, parts, places};
}
/**
 * The canvases of a picture below each other.
 * @param {HTMLElement} root
 * @param {string} paper the colour of the background
 */
export function flattened(root, paper) {
  const all = [...root.querySelectorAll("canvas")], made = document.createElement("canvas"), c = made.getContext("2d");
  made.width = Math.max(...all.map(canvas => canvas.width));
  made.height = all.reduce((sum, canvas) => sum + canvas.height, 0);
  if (c) {
    c.fillStyle = paper;
    c.fillRect(0, 0, made.width, made.height);
    let y = 0;
    for (const canvas of all) { c.drawImage(canvas, 0, y); y += canvas.height; }
  }
  return made;
}
/**
 * @param {string} name of the file
 * @param {Blob} blob
 */
export function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
