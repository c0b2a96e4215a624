// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"slices"
	"unsafe"
)

// children finds the children of a tree's node by the first hash of each: in a list while
// there are few, then in a map. Go's maps grow by parts of about a thousand entries, so
// no event takes longer because of the millions of children that a root may have.
type children[N any] struct {
	few  []child[N]
	many map[uint64]*N // nil while all children are in few
}

type child[N any] struct {
	first uint64
	node  *N
}

const maxFew = 8

func (c *children[N]) len() int { return len(c.few) + len(c.many) }

func (c *children[N]) get(first uint64) *N {
	if c.many != nil {
		return c.many[first]
	}
	for i := range c.few {
		if c.few[i].first == first {
			return c.few[i].node
		}
	}
	return nil
}

// set makes n the child with a first hash, in place of a former one.
func (c *children[N]) set(first uint64, n *N) {
	if c.many == nil {
		if i := c.index(first); i >= 0 {
			c.few[i].node = n
			return
		}
		if len(c.few) < maxFew {
			c.few = insert(c.few, len(c.few), child[N]{first, n})
			return
		}
		c.many = make(map[uint64]*N, 2*maxFew)
		for _, k := range c.few {
			c.many[k.first] = k.node
		}
		c.few = nil
	}
	c.many[first] = n
}

func (c *children[N]) index(first uint64) int {
	return slices.IndexFunc(c.few, func(k child[N]) bool { return k.first == first })
}

// remove removes the child with a first hash.
func (c *children[N]) remove(first uint64) {
	if c.many == nil {
		c.few = cut(c.few, c.index(first))
		return
	}
	if delete(c.many, first); len(c.many) > maxFew/2 {
		return
	}
	c.few = make([]child[N], 0, len(c.many))
	for first, n := range c.many {
		c.few = append(c.few, child[N]{first, n})
	}
	c.many = nil
}

// bytes returns the heap memory of the children. A map that was larger before takes more:
// it does not shrink.
func (c *children[N]) bytes() int {
	return heapSize(int(unsafe.Sizeof(child[N]{}))*cap(c.few)) + mapBytes(len(c.many))
}
