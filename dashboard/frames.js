// SPDX-License-Identifier: Apache-2.0
// Drawing in parts. Between two frames the browser shows what is drawn and reacts to the user: a state of many workers
// must not be one long task.

const budget = 2 // ms in a frame; layout and paint of what was written take several times as long
const queue = new Set()
let frame // undefined while none is requested

// soon runs a part in one of the next frames, after the parts that wait already. A part that waits is not added again.
export function soon(part) {
  queue.add(part)
  frame ??= requestAnimationFrame(run)
}

function run() {
  const start = performance.now()
  frame = undefined
  for (const part of queue) {
    queue.delete(part)
    part()
    if (performance.now() - start > budget) break
  }
  if (queue.size > 0) frame ??= requestAnimationFrame(run)
  performance.measure('update', { start })
  if (performance.getEntriesByName('update').length > 500) performance.clearMeasures()
}
