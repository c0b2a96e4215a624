// SPDX-License-Identifier: Apache-2.0

package indexer

import "slices"

// children finds a node's children by their first local hash: a list while there are
// few, then a map. Go's maps grow by parts of about a thousand entries, so no event
// takes longer for the millions of children that the root may have.
type children struct {
	few  []child
	many map[uint64]*node // nil while few has them all
	peak int              // the most entries that many has had: it does not shrink
}

type child struct {
	local uint64
	node  *node
}

const maxFew = 8

func (c *children) len() int { return len(c.few) + len(c.many) }

func (c *children) get(local uint64) *node {
	if c.many != nil {
		return c.many[local]
	}
	for i := range c.few {
		if c.few[i].local == local {
			return c.few[i].node
		}
	}
	return nil
}

// set makes n the child with a local hash, in the place of the one that there was.
func (c *children) set(local uint64, n *node) {
	if c.many == nil {
		if i := c.index(local); i >= 0 {
			c.few[i].node = n
			return
		}
		if len(c.few) < maxFew {
			c.few = insert(c.few, len(c.few), child{local, n})
			return
		}
		c.many = make(map[uint64]*node, 2*maxFew)
		for _, k := range c.few {
			c.many[k.local] = k.node
		}
		c.few = nil
	}
	c.many[local] = n
	c.peak = max(c.peak, len(c.many))
}

func (c *children) index(local uint64) int {
	return slices.IndexFunc(c.few, func(k child) bool { return k.local == local })
}

// remove removes the child with a local hash.
func (c *children) remove(local uint64) {
	if c.many == nil {
		c.few = cut(c.few, c.index(local))
		return
	}
	if delete(c.many, local); len(c.many) > maxFew/2 {
		return
	}
	rest := c.many
	*c = children{few: make([]child, 0, len(rest))}
	for local, n := range rest {
		c.few = append(c.few, child{local, n})
	}
}

// bytes returns what the children take of the heap.
func (c *children) bytes() int { return heapSize(childBytes*cap(c.few)) + mapBytes(c.peak) }
