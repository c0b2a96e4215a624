// SPDX-License-Identifier: Apache-2.0

package slots

import (
	"fmt"
	"time"
)

// MarkPrefillCompleted notes a first token observed at the time now.
func (s *Table) MarkPrefillCompleted(now time.Time, id string) bool {
	news, _ := s.FirstToken(now, id, true)
	return news
}

// Left counts the entries that must be 0 after all slots are freed.
func (s *Table) Left() int {
	left := len(s.ids) + len(s.slots) - len(s.vacant) + s.tree.heads.used
	for _, w := range s.workers {
		if w != (account{}) {
			left++
		}
	}
	return left + max(1, len(s.tree.nodes)) - 1 - len(s.tree.vacant)
}

// Broken returns the broken invariant of the tree, or "" if all hold.
func (s *Table) Broken() string {
	refs, users := map[int32]int32{}, map[int32]int32{}
	blocks := map[int]int{} // by worker
	for n := range s.slots {
		t := &s.slots[n]
		blocks[t.Worker] += t.output
		if !t.taken || t.leaf == 0 {
			blocks[t.Worker] += t.lone
			continue
		}
		lone := 0
		for at := t.leaf; s.tree.nodes[at].parent != 0; at = s.tree.nodes[at].parent {
			refs[at]++
			users[at] ^= int32(n)
			if s.tree.nodes[at].refs == 1 {
				lone += len(s.tree.nodes[at].blocks)
			}
		}
		if lone != t.lone {
			return fmt.Sprintf("slot %d has %d blocks alone, not %d", n, lone, t.lone)
		}
	}
	below := map[int32]int{} // by root
	for i, n := range s.tree.nodes {
		at := int32(i)
		if refs[at] != n.refs || users[at] != n.users {
			return fmt.Sprintf("node %d has %d refs by %d, not %d by %d", i, refs[at], users[at], n.refs, n.users)
		}
		if n.refs > 0 {
			root := n.parent
			for s.tree.nodes[root].parent != 0 {
				root = s.tree.nodes[root].parent
			}
			below[root] += len(n.blocks)
			if len(n.blocks) == 0 || s.tree.heads.get(n.parent, n.blocks[0]) != at {
				return fmt.Sprintf("nothing leads to node %d", i)
			}
		}
	}
	for i, w := range s.workers {
		if want := blocks[i] + below[w.root]; w.Blocks != want {
			return fmt.Sprintf("worker %d has %d blocks, not %d", i, w.Blocks, want)
		}
	}
	if len(refs) != s.tree.heads.used {
		return fmt.Sprintf("%d heads of %d nodes", s.tree.heads.used, len(refs))
	}
	return ""
}

// Endings returns how many changes of a worker's requests are kept.
func (s *Table) Endings(worker int) int { return len(s.histories[worker].unreported.changes) }
