// Search by frame: which stacks contain a text, and so which allocations.

/** What a search finds in a recording; `null` without a text. */
export function findFrames(recording, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return null;
  const { stacks, groups, allocations } = recording;
  const frames = stacks.frameText.map((frame) => frame.toLowerCase().includes(wanted));
  // A call is found if it or one of its callers is; callers come first.
  const nodes = new Uint8Array(stacks.parent.length);
  for (let node = 0; node < nodes.length; node++) {
    const parent = stacks.parent[node];
    nodes[node] = frames[stacks.frame[node]] || (parent >= 0 && nodes[parent]) ? 1 : 0;
  }
  const named = groups.list.map((group) => group.call.toLowerCase().includes(wanted));
  const matches = new Uint8Array(allocations.count);
  let count = 0;
  for (let at = 0; at < allocations.count; at++) {
    const stack = allocations.stack[at];
    matches[at] = stack ? nodes[stacks.node[stack - 1]] : named[groups.of[at]] ? 1 : 0;
    count += matches[at];
  }
  return { text: wanted, frames, nodes, matches, count };
}

/** The requested bytes and the number of matching allocations that are active at a position. */
export function foundAt(recording, search, position) {
  let [bytes, count] = [0, 0];
  for (const at of recording.activeAt(position)) {
    if (!search.matches[at]) continue;
    bytes += recording.allocations.requested[at];
    count += 1;
  }
  return { bytes, count };
}
