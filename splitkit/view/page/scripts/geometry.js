// @ts-check
// The sizes of the ladder in pixels, before zooming.
export const ROW = 26, GAP = 10, BOX = 220, RIBBONS = 190, LEFT = 170;
