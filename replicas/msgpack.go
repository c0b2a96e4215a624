// SPDX-License-Identifier: Apache-2.0

package replicas

import "github.com/tinylib/msgp/msgp"

// packer appends entries of MessagePack maps.
type packer struct{ b []byte }

func (p *packer) header(entries int)     { p.b = msgp.AppendMapHeader(p.b, uint32(entries)) }
func (p *packer) key(key string)         { p.b = msgp.AppendString(p.b, key) }
func (p *packer) null(key string)        { p.b = msgp.AppendNil(msgp.AppendString(p.b, key)) }
func (p *packer) text(key, value string) { p.b = msgp.AppendString(msgp.AppendString(p.b, key), value) }

func (p *packer) flag(key string, v bool) { p.b = msgp.AppendBool(msgp.AppendString(p.b, key), v) }

func (p *packer) uint(key string, v uint64) { p.b = msgp.AppendUint64(msgp.AppendString(p.b, key), v) }
func (p *packer) count(key string, n int)   { p.uint(key, uint64(max(0, n))) }
