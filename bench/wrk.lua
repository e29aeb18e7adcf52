-- Sends each line of a file as a JSON body, once: wrk.lua FILE PATH. Prints the first response that was
-- not a 200, and one line of JSON at the end.
-- One wrk thread only, so that no two threads send the same line.

local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

function init(args)
  requests, sent, refused = {}, 0, 0
  wrk.method = "POST"
  wrk.path = args[2]
  wrk.headers["Content-Type"] = "application/json"
  for line in io.lines(args[1]) do
    requests[#requests + 1] = wrk.format(nil, nil, nil, line)
  end
end

function request()
  sent = sent + 1
  return requests[(sent - 1) % #requests + 1]
end

function response(status, headers, body)
  if status ~= 200 then
    refused = refused + 1
    refusal = refusal or status .. " " .. body:sub(1, 300):gsub("%c", " ")
  end
end

function done(summary, latency)
  local sent, refused = 0, 0
  for _, thread in ipairs(threads) do
    sent = sent + thread:get("sent")
    refused = refused + thread:get("refused")
    if thread:get("refusal") then
      io.write("\nREFUSED " .. thread:get("refusal"))
    end
  end
  local e = summary.errors
  io.write(string.format(
    '\nRESULT {"requests":%d,"seconds":%.6f,"sent":%d,"p50":%.3f,"p90":%.3f,"p99":%.3f,"p99.9":%.3f,"max":%.3f,"errors":%d,'
    .. '"connect":%d,"read":%d,"write":%d,"timeout":%d,"refused":%d}\n',
    summary.requests, summary.duration / 1e6, sent,
    latency:percentile(50) / 1e3, latency:percentile(90) / 1e3, latency:percentile(99) / 1e3,
    latency:percentile(99.9) / 1e3, latency.max / 1e3,
    e.connect + e.read + e.write + e.timeout + refused,
    e.connect, e.read, e.write, e.timeout, refused))
end
