// SPDX-License-Identifier: Apache-2.0

package indexer

// Nodes counts the nodes of the tree, without the root.
func (x *Index) Nodes() int {
	var count func(*node) int
	count = func(n *node) int {
		sum := 0
		for _, c := range n.children {
			sum += 1 + count(c)
		}
		return sum
	}
	return count(&x.root)
}
