// @ts-check
// Draws the picture that belongs to the data.
import {Halves} from "./joint.js";
import {Ladder} from "./ladder.js";
import {Staged} from "./staged.js";

/**
 * @param {HTMLElement} parent
 * @param {LadderData | JointData | StagedData} data
 * @param {Options} [options]
 */
export function show(parent, data, options = {}) {
  // a page of its own keeps its state in its address, so that a link or a reload shows it again; a frame has no address
  const hasAddress = !/^(about|blob|data):$/.test(location.protocol), told = new URLSearchParams(location.hash.slice(1));
  /** @type {Halves | Ladder | null} */
  let picture = null;
  const onstate = () => {
    if (!picture) return;
    const text = new URLSearchParams(Object.entries(picture.state).filter(([, value]) => value)).toString();
    if (text !== location.hash.slice(1)) history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  };
  const own = hasAddress ? {...options, onstate} : options;
  const made = ("choices" in data ? new Halves(data, own) : "waits" in data ? new Staged(data, own) : new Ladder(data, own)).mount(parent);
  if (hasAddress) made.restore(told);
  picture = made;
  onstate();
  return made;
}
