// The data that Python sends to the page, and the types that scripts share. Only the type checker reads this file.

/** The colours of parts, as in all pictures; bundle.py writes them above the scripts. */
declare const COLOURS: string[];

type Kind = "F" | "B" | "I" | "W";
/** rank, kind, stage, microbatch */
type Action = [number, Kind, number, number];
/** rank, kind, stage, microbatch, start, end */
type TimedAction = [number, Kind, number, number, number, number];
/** from row, to row, bytes */
type Triple = [number, number, number];
/** seconds, bytes */
type Point = [number, number];

interface RowData { name: string; ops: number; kind: number; part: number }

/** The columns of `splitkit.view.data.joint_ladder.LadderModel.ops`, one entry per op. */
interface OpColumns {
  name: string[];
  row: number[];
  modules: string[];
  module: number[];
  /** op, value, bytes, seconds */
  sorts: [string, string, number, number][];
  sort: number[];
  /** lines of Python */
  sources: string[];
  source: number[];
  /** how many entries further up each value is that an op reads */
  reads: number[][];
}

interface ByteColumns { saved: number[]; temporary: number[]; fixed: number[] }
interface TimeColumns { forward: number[]; backward: number[]; on?: {forward: number[][]; backward: number[][]} }
type StageColumns = ByteColumns & TimeColumns;

/** schedule, microbatches and links as indices; ranks, seconds, bubble, bytes of the highest peak; recompute as an index */
type WhatIfRow = [number, number, number, number, number, number, number, number];
/** `splitkit.view.data.ladder.what_if`: other steps of the same stages. */
interface WhatIf { schedules: string[]; microbatches: number[]; links: string[]; recompute: string[]; rows: WhatIfRow[]; own: number }

/** A step that ran: the start and end of each of the run's events, and the memory of each rank above what it held before. */
interface MeasuredRun { seconds: number; times: [number, number][]; memory: Point[][] }

/** `splitkit.view.data.staged_ladder.memory_data`: the memory of each rank over time. */
interface MemoryByStage {
  /** bytes of each stage: throughout the step; saved for a microbatch; temporary of an action; captured for and left to the weight part */
  units: number[][];
  /** the stages of each rank */
  owned: number[][];
  /** how many of the counts are told of each stage of a rank: 2 where nothing waits for the weight part, else 4 */
  counts: number;
  /** for each rank: seconds, bytes of messages, then the counts of all but the first of `units` for each of its stages */
  points: number[][][];
  /** for each rank the first point at which its memory is at its peak */
  highest: number[];
  /** why it cannot be divided by module; "" if it can */
  why: string;
}

interface Run {
  name: string;
  microbatches: number;
  stages: number;
  ranks: number;
  seconds: number;
  unit: string;
  bubble: number;
  peaks: number[];
  /** the rank of each stage */
  rankOf: number[];
  /** devices of each rank */
  replicas: number[];
  events: TimedAction[];
  by: MemoryByStage;
  /** for each stage and kind of action, when its collectives start and end, in seconds from its start; nothing where there are none */
  exchanges: Record<string, [number, number][]>[];
  /** null where there are none */
  whatIf: WhatIf | null;
  /** null where there is none */
  measured: MeasuredRun | null;
}

/** Another plan: its step is null where the schedule does not take its stages, or there is none. */
interface Beside { note: string; parts: string[]; rows: number[]; stages: StageColumns; step: {seconds: number; bubble: number; peak: number; unit: string} | null }

/** The data that both pages have. */
interface CommonData {
  schema: string;
  title: string;
  unit: string;
  memory: number | null;
  rows: RowData[];
  /** the first row of each stage of the plan, and the number of rows */
  borders: number[];
  edges: Triple[];
  ops: OpColumns;
}

/** `splitkit.view.data.ladder.LadderView.to_dict`. */
interface LadderData extends CommonData {
  note: string;
  trains: boolean;
  /** the tokens of all requests together for whose cache the plan leaves room */
  tokens?: number;
  parts: string[];
  devices: string[];
  times: TimeColumns;
  stages: StageColumns;
  down: number[];
  up: number[];
  saved: Triple[];
  /** for each of `saved` the ops that make it, or -1, and bytes */
  kept: [number, number][][];
  /** for each stage what it holds of a microbatch: the op that makes it or -1, how it comes or goes, and bytes; empty without a run */
  held: [number, string, number][][];
  /** the bytes of weights and state in each row; what several rows of a stage read counts in the first; empty without a run */
  weights: number[];
  marks: number[];
  /** the borders of 1, 2, 3 ... stages that divide the work evenly */
  even: number[][];
  /** of every run of segments between marks; null where backward runs all stages again */
  stretches: ByteColumns | null;
  /** the same as stages that backward runs again; null where it runs none */
  again: ByteColumns | null;
  /** whether backward runs each stage of the plan again */
  rerun: boolean[];
  /** values that such stages keep: the op that makes it or -1 for an input, bytes, and the ops that read it */
  taken: [number, number, number[]][];
  alone: ByteColumns;
  run: Run | null;
  beside: Beside[];
  /** the fields of the plan's file that stay when borders are moved */
  plan: {parts: object[]};
  /** where the capture of the graph failed, if it did: the last row and node that were reached, the line of Python, and the reason */
  stopped?: {row: number; node: string; at: string; why: string};
}

interface StepMemory {
  at: number;
  steps: number[];
  /** the change at each step; a string is the number of steps without one */
  bytes: (number | string)[];
  calls: [string, number, number][];
  /** what is not tiny, the largest first: op or name, kind, first step, last step, bytes */
  alive: [number | string, string, number, number, number][];
}

interface Choice extends TimeColumns {
  note: string;
  peak: number;
  bytes: number;
  seconds: number; waits: number;
  again: number[];
  saved: Triple[];
  /** for each of `saved` the ops that make what is saved, or -1 for an input, and bytes */
  kept: [number, number][][];
  memory: StepMemory;
}

/** `splitkit.view.data.joint_ladder.HalvesView.to_dict`. */
interface JointData extends CommonData { late: number; choices: Choice[]; chosen: number }

/** `splitkit.view.data.staged_ladder.StagedView.to_dict`: a training step in stages. Its borders cannot be moved. */
interface StagedData extends LadderData {
  divided: boolean;
  /** the first op of backward */
  late: number;
  /** for each op the row and column (0 forward, 1 backward or its input part, 2 weight part) of each part that computes it, one after the other */
  places: number[][];
  times: TimeColumns & {weight: number[]; again: number[]};
  counts: {forward: number[]; backward: number[]; weight: number[]; again: number[]};
  stages: StageColumns & {weight: number[]; waiting: number[]; again: number[]};
  waits: Triple[];
  /** for each of `waits`, as `kept` */
  left: [number, number][][];
  /** for each border the ops whose values cross it, and bytes: activations, then gradients */
  crossing: [[number, number][], [number, number][]][];
}

/** The costs of consecutive rows; a stage of a pipeline has more bytes. */
interface RowPrice { forward: number; backward: number; saved: number; weight?: number }
interface Price extends RowPrice { temporary: number; fixed: number; seconds: number; peak: number }
interface Stage extends Price { start: number; end: number; down: number; up: number }

interface Box { x: number; y: number }
interface Rect extends Box { w: number; h: number }
/** A module inside an open row; a closed one looks like an op. */
interface Frame extends Rect { key: string; module: string; ops: number[]; open: boolean }
/** The ops of an open row, in layers. */
interface Inner {
  /** the ops that are visible themselves, with the module that they are alone in */
  boxes: Map<number, Box & {alone: string}>;
  /** from outside to inside */
  frames: Frame[];
  /** where each op is, or the closed frame that hides it */
  place: Map<number, Rect>;
  width: number;
  height: number;
  up?: boolean;
  /** 2 in the second part of backward */
  column?: number;
}

/** A row, or a run of equal rows that are folded. */
interface Item {
  start: number;
  end: number;
  /** the row whose ops an open item shows */
  shows: number;
  y: number;
  h: number;
  w: number;
  /** the width of its backward box */
  w2: number;
  inner: Inner | null;
  mirror: Inner | null;
  /** the width of the box of the second part of backward, and its ops */
  w3: number;
  late: Inner | null;
}

/** What the mouse points at, or what is selected; a frame is the module `frame` inside a row. */
interface Target { op?: number; row?: number; frame?: string; stage?: number; border?: number; ribbon?: [number, number, number?] }

interface Options {
  dark?: boolean;
  height?: number | null;
  /** called when borders have moved */
  onplan?: (borders: number[]) => void;
  /** called when the slider has moved; returns whether Python plans and will answer */
  oncount?: (count: number, own: boolean) => boolean;
  /** called when something has changed that the address of the page tells */
  onstate?: () => void;
}

interface Ink { fg: string; mut: string; bg: string; bad: string; rib: string }

/** An instant of a step: a rank, and the number of a point of its memory. */
interface Instant { run: Run; rank: number; i: number }

/** A chart below the ladder. */
interface Chart { paint(): void; paintOn(c: CanvasRenderingContext2D, w: number, h: number): void; canvas: HTMLCanvasElement }

/** anywidget's model: the state that the widget shares with Python. */
interface WidgetModel {
  get(name: "data"): LadderData;
  get(name: "borders"): number[];
  get(name: "answers" | "height"): number;
  set(name: string, value: unknown): void;
  save_changes(): void;
  send(content: unknown): void;
  on(name: string, listener: (message: any) => void): void;
  off(name: string, listener: (message: any) => void): void;
}
