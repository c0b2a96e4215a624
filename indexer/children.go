// SPDX-License-Identifier: Apache-2.0

package indexer

import "slices"

// children finds a node's children by their first local hash: a list while there
// are few, then a table with linear probing, then a fan of children by the uppermost
// bits of the hash, each of which grows by itself. So no event moves more entries
// than one table has, however many children there are: the millions that begin a
// sequence stand in such a fan, too.
type children struct {
	n     int
	slots []child
	fan   *[fanOut]children // then there are no slots
}

type child struct {
	local uint64
	node  *node
}

const (
	maxList  = 8
	maxTable = 1024 // slots
	fanBits  = 6
	fanOut   = 1 << fanBits
)

// spreadAt is spread for children that are so deep in fans: what they have in common
// is gone.
func spreadAt(local uint64, depth int) uint64 { return spread(local) << (depth * fanBits) }

func fanned(hash uint64) int { return int(hash >> (64 - fanBits)) }

func (c *children) get(local uint64) *node {
	hash := uint64(0)
	if c.fan != nil {
		for hash = spread(local); c.fan != nil; hash <<= fanBits {
			c = &c.fan[fanned(hash)]
		}
	} else if len(c.slots) > maxList {
		hash = spread(local)
	}
	if len(c.slots) <= maxList {
		for i := range c.slots {
			if c.slots[i].local == local {
				return c.slots[i].node
			}
		}
		return nil
	}
	return c.slots[c.find(local, hash)].node
}

// find returns the slot of the table that has a local hash, or would have it.
func (c *children) find(local, hash uint64) int {
	i := c.place(hash)
	for c.slots[i].node != nil && c.slots[i].local != local {
		i = c.after(i)
	}
	return i
}

func (c *children) place(hash uint64) int { return int(hash >> 32 & uint64(len(c.slots)-1)) }

func (c *children) after(i int) int { return (i + 1) & (len(c.slots) - 1) }

// add adds a child whose local hash no other one has.
func (c *children) add(local uint64, n *node) { c.addAt(0, child{local, n}) }

func (c *children) addAt(depth int, k child) {
	c.n++
	switch {
	case c.fan != nil:
	case c.n <= maxList && len(c.slots) < maxList:
		c.slots = insert(c.slots, len(c.slots), k)
		return
	case len(c.slots) <= maxList:
		c.resize(depth, 2*maxList)
	case c.n*4 <= len(c.slots)*3:
	case len(c.slots) < maxTable:
		c.resize(depth, 2*len(c.slots))
	default:
		old := c.slots
		c.slots, c.fan = nil, new([fanOut]children)
		for _, k := range old {
			if k.node != nil {
				c.fan[fanned(spreadAt(k.local, depth))].addAt(depth+1, k)
			}
		}
	}
	if c.fan != nil {
		c.fan[fanned(spreadAt(k.local, depth))].addAt(depth+1, k)
		return
	}
	c.slots[c.find(k.local, spreadAt(k.local, depth))] = k
}

// resize makes a table of so many slots, or a list. What is in a fan is gathered.
func (c *children) resize(depth, size int) {
	old := *c
	c.fan = nil
	if size <= maxList {
		c.slots = make([]child, 0, size)
	} else {
		c.slots = make([]child, size)
	}
	for k := range old.each() {
		if size <= maxList {
			c.slots = append(c.slots, k)
		} else {
			c.slots[c.find(k.local, spreadAt(k.local, depth))] = k
		}
	}
}

func (c *children) remove(local uint64) { c.removeAt(0, local) }

func (c *children) removeAt(depth int, local uint64) {
	c.n--
	hash := spreadAt(local, depth)
	switch {
	case c.fan != nil:
		if c.fan[fanned(hash)].removeAt(depth+1, local); c.n < maxTable/4 {
			c.resize(depth, maxTable/2)
		}
		return
	case len(c.slots) <= maxList:
		c.slots = cut(c.slots, slices.IndexFunc(c.slots, func(k child) bool { return k.local == local }))
		return
	}
	hole := c.find(local, hash)
	for j := c.after(hole); c.slots[j].node != nil; j = c.after(j) {
		// What does not belong behind the hole closes it.
		if mask := len(c.slots) - 1; (j-c.place(spreadAt(c.slots[j].local, depth)))&mask >= (j-hole)&mask {
			c.slots[hole] = c.slots[j]
			hole = j
		}
	}
	c.slots[hole] = child{}
	switch {
	case c.n < maxList:
		c.resize(depth, c.n)
	case c.n*5 < len(c.slots) && len(c.slots) > 2*maxList:
		c.resize(depth, len(c.slots)/2)
	}
}

// replace puts another node into the place of the child with a local hash.
func (c *children) replace(local uint64, n *node) {
	for hash := spread(local); ; hash <<= fanBits {
		switch {
		case c.fan != nil:
			c = &c.fan[fanned(hash)]
			continue
		case len(c.slots) <= maxList:
			c.slots[slices.IndexFunc(c.slots, func(k child) bool { return k.local == local })].node = n
		default:
			c.slots[c.find(local, hash)].node = n
		}
		return
	}
}

// each yields the children in no order.
func (c *children) each() func(yield func(child) bool) {
	return func(yield func(child) bool) { c.yield(yield) }
}

func (c *children) yield(yield func(child) bool) bool {
	if c.fan != nil {
		for i := range c.fan {
			if !c.fan[i].yield(yield) {
				return false
			}
		}
	}
	for _, k := range c.slots {
		if k.node != nil && !yield(k) {
			return false
		}
	}
	return true
}

// bytes returns what the children take of the heap.
func (c *children) bytes() int {
	total := heapSize(childBytes * cap(c.slots))
	if c.fan != nil {
		total += heapSize(fanOut * childrenBytes)
		for i := range c.fan {
			total += c.fan[i].bytes()
		}
	}
	return total
}
