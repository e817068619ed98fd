// @ts-check
// Draws the picture that belongs to the data.
import {Halves} from "./joint.js";
import {Ladder} from "./ladder.js";

/**
 * @param {HTMLElement} parent
 * @param {LadderData | JointData} data
 * @param {Options} [options]
 */
export function show(parent, data, options = {}) { return ("choices" in data ? new Halves(data, options) : new Ladder(data, options)).mount(parent); }
