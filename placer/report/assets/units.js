// Formats numbers with units.

// As in envs/hardware/units.py: four significant digits, trailing zeros are kept.
function fourDigits(value) {
  const exponent = Number(value.toExponential(3).split("e")[1]);
  return value.toFixed(Math.min(Math.max(3 - exponent, 0), 6));
}

function digits(value) {
  const size = Math.abs(value);
  const places = size >= 100 || value === 0 ? 0 : size >= 10 ? 1 : 2;
  return value.toLocaleString("en", {
    minimumFractionDigits: places,
    maximumFractionDigits: places,
  });
}

function scaled(value, units, tell = digits) {
  const [unit, scale] =
    units.find(([, least]) => Math.abs(value) >= least * 0.9995) ?? units.at(-1);
  return `${tell(value / scale)}\u00a0${unit}`;
}

const TIMES = [
  ["s", 1],
  ["ms", 1e-3],
  ["µs", 1e-6],
  ["ns", 1e-9],
];
const time = (seconds) => (seconds == null ? "–" : seconds === 0 ? "0 s" : scaled(seconds, TIMES, fourDigits));
const nanoseconds = (ns) => time(ns / 1e9);
const BYTES = [
  ["TB", 1e12],
  ["GB", 1e9],
  ["MB", 1e6],
  ["kB", 1e3],
];
const bytes = (size) => (size < 999.5 ? `${Math.round(size)}\u00a0B` : scaled(size, BYTES));
const FLOPS = [
  ["TFLOP", 1e12],
  ["GFLOP", 1e9],
  ["MFLOP", 1e6],
  ["kFLOP", 1e3],
];
const flops = (work) => (work < 999.5 ? `${Math.round(work)}\u00a0FLOP` : scaled(work, FLOPS));
const count = (value) => value.toLocaleString("en");
const percent = (ratio) =>
  ratio === 0
    ? "0\u00a0%"
    : ratio > 0 && ratio < 0.0005
      ? "below\u00a00.1\u00a0%"
      : `${(100 * ratio).toFixed(Math.abs(ratio) < 0.0995 ? 1 : 0)}\u00a0%`;
const share = (part, whole) => (whole > 0 ? percent(part / whole) : "–");
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

// Round numbers on an axis from 0, or from `low`, to `high`.
function ticks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) ?? 10);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high * (1 + 1e-9); at += step) found.push(at);
  return found;
}

// The unit of an axis, and the format of its ticks.
function inUnit(largest, units) {
  const [unit, scale] = units.find(([, least]) => largest >= least) ?? units.at(-1);
  return {
    unit,
    tell: (value) => (value / scale).toLocaleString("en", { maximumFractionDigits: 6 }),
  };
}
